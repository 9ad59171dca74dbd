"""Exports XTuner's ``LLaVAModel``: ``llm``, ``visual_encoder`` and ``projector``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from xhf_hooks.errors import OptionError
from xhf_hooks.exporters import hf_assets
from xhf_hooks.exporters.composite import CompositeExporter
from xhf_hooks.exporters.huggingface import HuggingFaceExporter
from xhf_hooks.exporters.lora.adapter import AdapterExporter, adapters_in, trained_adapter
from xhf_hooks.exporters.lora.exporter import ADAPTER_FOLDER
from xhf_hooks.exporters.lora.merge import MergedExporter
from xhf_hooks.exporters.xtuner.llava_hf import LlavaHuggingFaceExporter
from xhf_hooks.format.safetensors import AS_IN_BASE
from xhf_hooks.planning.types import ExportEntry, TensorSpec
from xhf_hooks.registry import EXPORTERS

if TYPE_CHECKING:
    from peft import PeftModel

#: Folders of complete parts in ``LLaVAModel.to_xtuner_llava`` (xtuner ``model/llava.py``), with the llm in the
#: checkpoint itself, where ``xtuner chat CHECKPOINT --llava CHECKPOINT`` expects it. Adapters: ``<part>_adapter``.
_FOLDERS = {'llm': '', 'visual_encoder': 'visual_encoder', 'projector': 'projector'}


@EXPORTERS.register_module()
class LlavaExporter(CompositeExporter):
    """Writes the trained parts in XTuner's layout, or transformers' LlavaForConditionalGeneration.

    Args:
        lora: 'adapter', 'merge' or 'both', if a part has an adapter. Beside merged parts the adapters go to
            ``adapter/<part>_adapter``, because XTuner would apply ``llm_adapter`` to the merged llm again.
        llava_format: One of LLAVA_FORMATS. 'xtuner' omits frozen parts, as XTuner does.

    Raises:
        OptionError: ``lora`` was given without an adapter, or is 'adapter' in a format without adapters.
        ModelError: A part cannot be exported in this format.
    """

    options: tuple[str, ...] = ('lora', 'llava_format')

    def __init__(
        self, model: nn.Module, module: str | None, lora: str | None = None, llava_format: str = 'xtuner'
    ) -> None:
        adapted = {name: child for name, child in adapters_in(model).items() if name in _FOLDERS}
        if lora is not None and not adapted:
            raise OptionError('lora', 'None, because neither llm nor visual_encoder has an adapter', lora)
        if llava_format == 'huggingface' and lora == 'adapter':
            raise OptionError('lora', "None, 'merge' or 'both' with llava_format 'huggingface'", lora)
        self.parts = {}
        notes: list[str] = []
        if llava_format == 'huggingface':
            self.parts[''] = LlavaHuggingFaceExporter(model)
            self._add_adapters(adapted, beside_merged=True, wanted=lora == 'both')
        else:
            lora = lora or 'adapter'
            self._add_trained_parts(model, adapted, lora, notes)
            self._add_adapters(adapted, beside_merged=lora == 'both', wanted=lora != 'merge')
        self.tokenizer_folder = next((folder for folder in ('', 'llm_adapter') if folder in self.parts), None)
        if self.tokenizer_folder is None:
            notes.append('the llm and its tokenizer are not written')
        self.notes = tuple(notes)
        self._llm = adapted['llm'].get_base_model() if 'llm' in adapted else model.llm
        self.base_dir = hf_assets.base_dir_of(self._llm)

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        from transformers import PreTrainedModel

        children = dict(model.named_children())
        adapted = adapters_in(model)
        return module is None and all(
            isinstance(children.get(name), PreTrainedModel) or (name in adapted and name != 'projector')
            for name in _FOLDERS
        )

    def entries(self, specs: Sequence[TensorSpec], dtype: str | None) -> list[ExportEntry]:
        if dtype == AS_IN_BASE:
            raise OptionError(
                'dtype', "another one for XTuner's LLaVAModel, whose parts have bases of their own", dtype
            )
        return super().entries(specs, dtype)

    def base_tokenizer(self) -> Any | None:
        return hf_assets.base_tokenizer_of(self._llm)

    def _add_trained_parts(self, model: nn.Module, adapted: dict[str, PeftModel], lora: str, notes: list[str]) -> None:
        for name, folder in _FOLDERS.items():
            child = getattr(model, name)
            if name in adapted:
                if lora != 'adapter':
                    self.parts[folder] = MergedExporter(model, name, child, trained_adapter(name, child))
            elif name == 'projector' or any(p.requires_grad for p in child.parameters()):
                self.parts[folder] = HuggingFaceExporter(model, name)
            else:
                base = hf_assets.base_dir_of(child) or 'its base model'
                notes.append(f"{name} is frozen and not written: use {base}, or set llava_format to 'huggingface'")

    def _add_adapters(self, adapted: dict[str, PeftModel], *, beside_merged: bool, wanted: bool) -> None:
        if wanted:
            for name, child in adapted.items():
                folder = f'{ADAPTER_FOLDER}/{name}_adapter' if beside_merged else f'{name}_adapter'
                adapter = trained_adapter(name, child)
                self.parts[folder] = AdapterExporter(name, child, adapter, alone=not beside_merged)
