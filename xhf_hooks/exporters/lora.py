"""Exports models with LoRA adapters: as an adapter, merged, or both."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from xhf_hooks.compat.peft import edits_base, edits_base_again
from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters import hf_assets
from xhf_hooks.exporters.assets.write_tokenizer import write_tokenizer
from xhf_hooks.exporters.base import (
    CompositeExporter,
    Export,
    Exporter,
    ExportRequest,
    specs_below,
    unchanged_entries,
)
from xhf_hooks.exporters.base_config import warn_of_lost_config
from xhf_hooks.exporters.find_model import (
    adapters_in,
    adapters_in_use,
    base_path,
    find_adapter,
    find_pretrained,
    inactive_adapters,
)
from xhf_hooks.exporters.huggingface import HuggingFaceExporter
from xhf_hooks.exporters.loading_check import load_empty_adapter, loading_not_checked, require_none
from xhf_hooks.exporters.lora_merge import require_lora
from xhf_hooks.exporters.model_card import name_base_in_card
from xhf_hooks.exporters.on_meta import build_on_meta
from xhf_hooks.exporters.surroundings import Surroundings, ask_surroundings
from xhf_hooks.format.text import counted, error_text, some
from xhf_hooks.model import model_class, module_tensors, output_embedding, token_embeddings, without_wrappers
from xhf_hooks.planning.types import FileSet, Placement, TensorSpec

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

#: Folder of the adapter beside a merged model. In the same folder, it would make from_pretrained load the base model.
ADAPTER_FOLDER = 'adapter'
#: peft's SAFETENSORS_WEIGHTS_NAME; peft reads no other file.
ADAPTER_FILES = FileSet(stem='adapter_model', may_split=False)


class LoraExporter(CompositeExporter):
    """Exports a ``PeftModel``: the trained model, or a part of it such as ``llm``.

    Writes the active adapter, the merged model, or the merged model with the adapter in a subfolder. Several active
    adapters are merged together, or written into the folders into which peft's ``save_pretrained`` writes them.

    Raises:
        ModelError: The active adapters are not trained, or cannot be merged.
    """

    options: tuple[str, ...] = ('lora',)

    def __init__(self, model: nn.Module, module: str | None, lora: str = 'adapter') -> None:
        path, peft_model = find_adapter(model, module)
        self.parts = {}
        adapters = adapters_in_use(peft_model)
        if lora in ('merge', 'both'):
            require_lora(peft_model)
            self.parts[''] = self._merged(model, base_path(path), peft_model)
        if lora in ('adapter', 'both'):
            above = [ADAPTER_FOLDER] if self.parts else []
            for name in adapters:
                below = [] if len(adapters) == 1 or name == 'default' else [name]
                self.parts['/'.join(above + below)] = self._adapter(path, peft_model, name)
        self.tokenizer_folder = next(iter(self.parts))
        self.folder_around = ''  # what surrounds the model goes into the main folder
        self._model = self.parts[self.tokenizer_folder]._model
        self.notes = tuple(inactive_adapters(peft_model))

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        try:
            find_adapter(model, module)
        except ModelError:
            return False
        return True

    def _merged(self, model: nn.Module, path: str, peft_model: PeftModel) -> Exporter[Any]:
        return HuggingFaceExporter(model, path, {'': peft_model})

    def _adapter(self, path: str, peft_model: PeftModel, adapter: str) -> AdapterExporter:
        return AdapterExporter(path, peft_model, adapter)


@dataclass(frozen=True, kw_only=True)
class AdapterExport(Export):
    """What is written of an adapter.

    Attributes:
        embedding_rows: Rows of the input embedding of the adapted model; None if it has none.
        head_rows: Rows of its language-modelling head.
        saves_embeddings: Whether the adapter's files have the embeddings.
        surroundings: What is saved around the adapted model.
    """

    embedding_rows: int | None
    head_rows: int | None
    saves_embeddings: bool
    surroundings: Surroundings


class AdapterExporter(Exporter[AdapterExport]):
    """``adapter_config.json``, ``adapter_model.safetensors`` and the model card of the adapter.

    peft's ``get_peft_model_state_dict`` selects and renames the tensors (``modules_to_save``, trained biases, resized
    embeddings). It uses names only, so it works on specs.

    Args:
        path: Path of the PeftModel in the trained model.
        adapter: The name of the adapter to write.
    """

    def __init__(self, path: str, peft_model: PeftModel, adapter: str) -> None:
        self._path = path
        self._peft_model = peft_model
        self._adapter = adapter
        self._model = peft_model.get_base_model()

    def export(self, request: ExportRequest) -> AdapterExport:
        specs = request.specs
        # peft uses module paths, and FSDP1 adds components to them
        live = {without_wrappers(name): name for name, _ in module_tensors(self._peft_model, as_wrapped=True)}
        own = specs_below(self._path, specs)
        by_path = {live[name]: spec for name, spec in own.items()}
        found_by_adapter = {name: self._saved_by_peft(name, by_path) for name in adapters_in_use(self._peft_model)}
        found = found_by_adapter[self._adapter]
        read = {spec.name for spec in found.values()}
        read_by_all = {spec.name for one in found_by_adapter.values() for spec in one.values()}
        tensors = module_tensors(self._peft_model)
        rows = {id(tensor): own[name].shape[0] for name, tensor in tensors if name in own and own[name].shape}
        embeddings = {id(tensor) for tensor in token_embeddings(self._model)}
        saved = {id(tensor) for name, tensor in tensors if name in own and own[name].name in read}
        trained = {name for name, tensor in tensors if tensor.requires_grad}
        lost = {spec.name for name, spec in own.items() if name in trained} - read_by_all
        if lost:
            raise ModelError(
                f'{counted(len(lost), "trained tensor")} outside of the adapter would be lost: {sorted(lost)[:5]}. '
                f"Name their modules in the LoraConfig's modules_to_save, freeze them, or set lora to 'merge'"
            )
        surroundings = ask_surroundings(request, self._path, read)
        return AdapterExport(
            entries=(*unchanged_entries(found, request.dtype, ADAPTER_FILES), *surroundings.entries),
            adapter_base_tensors=frozenset(spec.name for spec in own.values()),
            warnings=surroundings.warnings,
            embedding_rows=max((rows[key] for key in embeddings if key in rows), default=None),
            head_rows=rows.get(id(output_embedding(self._model))),
            saves_embeddings=not embeddings.isdisjoint(saved),
            surroundings=surroundings,
        )

    def _saved_by_peft(self, adapter: str, by_path: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
        """The tensors that peft's ``save_pretrained`` writes of an adapter, by the names that it gives.

        Args:
            adapter: The name of the adapter.
            by_path: The tensors of the PeftModel.

        Raises:
            ModelError: peft computes what it writes from values of tensors.
        """
        from peft import get_peft_model_state_dict

        config = self._peft_model.peft_config[adapter]
        kind = str(config.peft_type.value)
        if config.is_prompt_learning:
            encoder = f'prompt_encoder.{adapter}.'
            if [name for name in by_path if name.startswith(encoder)] != [f'{encoder}embedding.weight']:
                raise _computed_by_peft(kind, 'the outputs of its encoder')
            return {'prompt_embeddings': by_path[f'{encoder}embedding.weight']}
        if kind == 'ADALORA':
            raise _computed_by_peft(kind, 'the ranks that it has not pruned')
        try:
            found = get_peft_model_state_dict(self._peft_model, state_dict=by_path, adapter_name=adapter)
        except Exception as error:  # of any type: peft computes with values, and these are only specs
            raise _computed_by_peft(kind, f'what it computes ({error_text(error)})') from error
        if made := [name for name, spec in found.items() if not isinstance(spec, TensorSpec)]:
            raise _computed_by_peft(kind, f'what it makes of attributes ({some(made)})')  # SHiRA's positions
        return {without_wrappers(name): spec for name, spec in found.items()}

    def check_loading(self, export: AdapterExport, placements: Sequence[Placement]) -> list[str]:
        try:
            base = self._build_base()
            own = [one for one in placements if one.file not in export.surroundings.weight_files]
            problems = load_empty_adapter(base, self._config, own)
        except Exception as error:  # of any type, from custom code
            return [loading_not_checked(model_class(self._model), error)]
        require_none(problems, f'peft, with this adapter of a {type(base).__name__},')
        return []

    def _build_base(self) -> PreTrainedModel:
        """The model onto which the adapter is loaded, on the meta device."""
        return build_on_meta(model_class(self._model), self._model.config)

    @property
    def _config(self) -> PeftConfig:
        """The config to write: that of the live adapter as it is now."""
        config = copy.copy(self._peft_model.peft_config[self._adapter])  # a deep copy could change the order of sets
        config.inference_mode = True
        return config

    def write_hf_assets(
        self, export: AdapterExport, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]
    ) -> list[str]:
        self._peft_model.create_or_update_model_card(str(folder))
        name_base_in_card(folder, self.base_model)
        config = self._config
        if config.base_model_name_or_path is None:  # as in peft's save_pretrained
            config.base_model_name_or_path = self._model.__dict__.get('name_or_path') or None
        auto_mapping = None
        if config.task_type is None:  # then AutoPeftModel reads the class from here
            kind = model_class(self._model)
            auto_mapping = {'base_model_class': kind.__name__, 'parent_library': kind.__module__}
        config.save_pretrained(folder, auto_mapping_dict=auto_mapping)
        warnings = hf_assets.compare_vocabulary(tokenizer, export.embedding_rows, export.head_rows, self)
        if not export.saves_embeddings:
            warnings += hf_assets.warn_of_lost_rows(export.embedding_rows, export.head_rows, self.base_model)
        if tokenizer is not None:
            warnings += write_tokenizer(folder, tokenizer, self.base_model)
        warnings += _warn_of_edited_base(config)
        warnings += warn_of_lost_config(self._model, self.base_model)
        if not config.base_model_name_or_path:
            warnings.append(
                'adapter_config.json has no base_model_name_or_path: the model was not loaded from a folder or hub name'
            )
        return warnings + export.surroundings.write(folder, self._path)


def _warn_of_edited_base(config: PeftConfig) -> list[str]:
    """A warning if the adapter belongs to a base that was changed when it was made, and that nobody can make again."""
    init = getattr(config, 'init_lora_weights', None)  # other tuners have none
    if not edits_base(init) or edits_base_again(init):
        return []
    return [
        f'init_lora_weights={init!r} changed the weights of {config.base_model_name_or_path} before training in a '
        f'way that peft cannot repeat when it loads the adapter: the loaded model differs from the trained one. Set '
        f"lora to 'merge', or save with peft's path_initial_model_for_weight_conversion, which makes a LoRA of the "
        f'unchanged base'
    ]


def _computed_by_peft(kind: str, what: str) -> ModelError:
    return ModelError(
        f'for an adapter of type {kind}, peft writes {what} instead of tensors of the model, and this save can only '
        f"copy tensors of the model. Save it with peft's own save_pretrained (at ZeRO-3 in zero.GatheredParameters), "
        f'or train with LoraConfig, IA3Config, VeraConfig, PromptTuningConfig, or PrefixTuningConfig without '
        f'prefix_projection'
    )


class NestedLoraExporter(HuggingFaceExporter):
    """Exports a ``PreTrainedModel`` with adapters on some parts, such as ``InternVL_V1_5``, merged and whole.

    The parts cannot be loaded separately, and other trained weights (InternVL's ``mlp1``) must be saved with them.
    ``convert_to_official.py``, which comes with the configs of InternVL, does the same.
    """

    options = ('lora',)

    def __init__(self, model: nn.Module, module: str | None, lora: str = 'merge') -> None:
        path, pretrained = find_pretrained(model, module)
        adapters = adapters_in(pretrained)
        if lora != 'merge':
            expected = f"None or 'merge', because {type(pretrained).__name__} has adapters on {sorted(adapters)}, which"
            raise OptionError('lora', f'{expected} cannot be loaded separately', lora)
        super().__init__(model, path, adapters)
        self.notes = tuple(note for peft_model in adapters.values() for note in inactive_adapters(peft_model))

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        try:
            _, pretrained = find_pretrained(model, module)
        except ModelError:
            return False
        return bool(adapters_in(pretrained))
