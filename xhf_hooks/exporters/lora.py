"""Exports models with LoRA adapters: as an adapter, merged, or both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters.base import CompositeExporter, Exporter
from xhf_hooks.exporters.huggingface import HuggingFaceExporter, find_pretrained, pretrained_in
from xhf_hooks.exporters.lora_adapter import AdapterExporter, adapters_in, trained_adapter
from xhf_hooks.model import without_wrappers
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.registry import EXPORTERS

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import PretrainedConfig

#: Folder of the adapter beside a merged model. In the same folder, it would make from_pretrained load the base model.
ADAPTER_FOLDER = 'adapter'


@EXPORTERS.register_module()
class LoraExporter(CompositeExporter):
    """Exports a ``PeftModel``: the trained model, or a part of it such as XTuner's ``llm``.

    Writes the adapter, the merged model, or the merged model with the adapter in a subfolder.

    Args:
        lora: One of LORA_MODES.

    Raises:
        ModelError: There is not exactly one trainable LoRA adapter, or it cannot be merged.
    """

    options: tuple[str, ...] = ('lora',)

    def __init__(self, model: nn.Module, module: str | None, lora: str = 'adapter') -> None:
        path, peft_model = _find_adapter(model, module)
        self.parts = {}
        if lora in ('merge', 'both'):
            self.parts[''] = self._merged(model, base_path(path), peft_model)
        if lora in ('adapter', 'both'):
            self.parts[ADAPTER_FOLDER if self.parts else ''] = self._adapter(path, peft_model, alone=not self.parts)
        self.base_dir = self.parts[''].base_dir

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        return _find_adapter(model, module) is not None

    def _merged(self, model: nn.Module, path: str, peft_model: PeftModel) -> Exporter:
        return MergedExporter(model, path, {'': peft_model})

    def _adapter(self, path: str, peft_model: PeftModel, *, alone: bool) -> Exporter:
        return AdapterExporter(path, peft_model, alone=alone)


def _find_adapter(model: nn.Module, module: str | None) -> tuple[str, PeftModel] | None:
    """The path and the PeftModel to export, by the rules of find_pretrained; None if another model is exported."""
    found = adapters_in(model)
    if module is not None:
        return next(((p, m) for p, m in found.items() if module in (p, base_path(p))), None)
    pretrained = pretrained_in(model)
    # An adapter inside a PreTrainedModel is exported with that model
    found = {p: m for p, m in found.items() if not any(p.startswith(f'{q}.'.removeprefix('.')) for q in pretrained)}
    if 'llm' in found and 'llm' not in pretrained:
        return 'llm', found['llm']
    if len(found) == len(pretrained) == 1:
        return next(iter(found.items()))
    return None


def base_path(path: str) -> str:
    """The path of the base model in the PeftModel at ``path``."""
    return f'{path}.base_model.model'.removeprefix('.')


class MergedExporter(HuggingFaceExporter):
    """Writes the same files as ``merge_and_unload`` and ``save_pretrained``.

    Args:
        path: Path of the model without its adapters.
        adapters: PeftModels by path below ``path``; '' for the one that holds the whole model.

    Raises:
        ModelError: The model is quantized, or a layer has an unsupported kind of adapter.
    """

    def __init__(self, model: nn.Module, path: str, adapters: Mapping[str, PeftModel]) -> None:
        super().__init__(model, path)
        if adapters and getattr(self._model.config, 'moe_implementation', None) == 'shard':
            raise ModelError(
                "merging an adapter into XTuner's sharded experts is not supported; set lora to 'adapter', or train "
                "with moe_implementation='origin'"
            )
        self._adapters = {below: trained_adapter(peft_model) for below, peft_model in adapters.items()}

    def _own_names(self, specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
        """The names of the merged model: without adapters, and with replacements instead of replaced modules."""
        own = super()._own_names(specs)
        if not self._adapters:
            return own
        from peft.tuners.lora import LoraLayer
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import other

        # The base of ModulesToSaveWrapper, which is alone before peft 0.15
        auxiliary = getattr(other, 'AuxiliaryTrainingWrapper', other.ModulesToSaveWrapper)
        self._computed = {}
        kept_below = {path: base_path(path) for path in self._adapters if path}  # by path of the wrapper
        merged: set[str] = set()
        for wrapped_path, module in self._model.named_modules(remove_duplicate=False):
            path = without_wrappers(wrapped_path)
            if isinstance(module, LoraLayer):
                kept_below[path] = f'{path}.base_layer'
                merged.add(self._note_merge(path, module, own))
            elif isinstance(module, other.ModulesToSaveWrapper):
                kept_below[path] = f'{path}.modules_to_save.{self._adapter_at(path)}'
            elif isinstance(module, (BaseTunerLayer, auxiliary)):
                raise _unknown(path, module)
        for name, spec in own.items():
            if spec.name in self._computed and name not in merged:
                raise _tied(name)
        return dict(_stripped(own, kept_below))

    def _adapter_at(self, path: str) -> str:
        return next(name for above, name in self._adapters.items() if not above or path.startswith(f'{above}.'))

    def _exported_config(self, own: dict[str, TensorSpec], dtype: str | None) -> PretrainedConfig:
        """Set tie_word_embeddings to False if ``modules_to_save`` untied the embeddings."""
        config = super()._exported_config(own, dtype)
        outputs = self._model.get_output_embeddings() if self._adapters else None
        if outputs is not None and self._model.get_input_embeddings().weight is not outputs.weight:
            for part in (config, config.get_text_config()):
                if getattr(part, 'tie_word_embeddings', False):
                    part.tie_word_embeddings = False
        return config

    def _note_merge(self, path: str, layer: LoraLayer, own: dict[str, TensorSpec]) -> str:
        """Record the merge of an adapted layer; returns the relative name of the merged weight."""
        from peft.tuners.lora import layer as kinds

        adapter = self._adapter_at(path)
        names = ('Linear', 'Embedding', 'Conv1d', 'Conv2d', 'Conv3d')  # old versions of peft have fewer
        if type(layer) not in [getattr(kinds, name, None) for name in names]:
            raise _unknown(path, layer)
        with_dora, variant = layer.use_dora[adapter], getattr(layer, 'lora_variant', {}).get(adapter)
        if variant is not None and not with_dora:
            raise _unknown(path, variant)
        if layer.merged:
            raise ModelError(f'{path}: the adapter is already merged into the live model; call unmerge_adapter()')
        if getattr(layer.get_base_layer(), 'groups', 1) > 1:
            raise ModelError(f"{path}: peft cannot merge a convolution with groups; set lora to 'adapter'")
        if getattr(layer, 'lora_bias', {}).get(adapter):
            raise ModelError(f"{path}: merging an adapter with lora_bias is not supported; set lora to 'adapter'")

        is_embedding = isinstance(layer, kinds.Embedding)
        part = '{}.lora_embedding_{}.{}' if is_embedding else '{}.lora_{}.{}.weight'
        weight = f'{path}.base_layer.weight'
        merge = WeightMerge(
            base=own[weight].name,
            lora_a=own[part.format(path, 'A', adapter)].name,
            lora_b=own[part.format(path, 'B', adapter)].name,
            magnitude=own[f'{path}.lora_magnitude_vector.{adapter}.weight'].name if with_dora else None,
            scaling=layer.scaling[adapter],
            transposed=is_embedding or bool(getattr(layer, 'fan_in_fan_out', False)),
        )
        if self._computed.setdefault(merge.base, merge) != merge:
            raise _tied(weight)
        return weight


@dataclass(frozen=True)
class WeightMerge:
    """Computes ``W + scaling * B A`` of one weight in fp32 (or wider), without rounding. Only reads the live model.

    The operations are those of peft's ``get_delta_weight``, ``merge`` and DoRA variants (``tuners/lora/layer.py``,
    ``variants.py``, ``dora.py``), so that fp32 linear layers equal peft's bit for bit. For 16-bit models peft rounds
    product, sum and norm; here the result is rounded once, on write.

    Attributes:
        base, lora_a, lora_b, magnitude: Source names. Shapes ``(out, in, ...)``, ``(rank, in, ...)``,
            ``(out, rank, ...)`` and, with DoRA, ``out`` elements.
        transposed: The weight is stored as ``(in, out)``: embeddings, and GPT-2's Conv1D.
    """

    base: str
    lora_a: str
    lora_b: str
    magnitude: str | None
    scaling: float
    transposed: bool

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.base, self.lora_a, self.lora_b, self.magnitude)))

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight = tensors[self.base]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        a, b = (tensors[name].to(dtype).flatten(1) for name in (self.lora_a, self.lora_b))
        merged = (b @ a).mul_(self.scaling)  # in place from here on, to save memory
        merged += weight.T if self.transposed else weight.flatten(1)
        if self.magnitude is not None:
            factor = tensors[self.magnitude].to(dtype).flatten() / torch.linalg.norm(merged, dim=1)
            merged *= factor.unsqueeze(1)
        return (merged.T if self.transposed else merged).reshape(weight.shape)


def _stripped(own: Mapping[str, TensorSpec], kept_below: Mapping[str, str]) -> Iterator[tuple[str, TensorSpec]]:
    """Rename the kept tensors of each wrapper to the wrapper's path, and drop the others."""
    for name, spec in own.items():
        parts = name.split('.')
        above = ['.'.join(parts[:end]) for end in range(1, len(parts))]
        wrappers = [path for path in above if path in kept_below]
        if all(name.startswith(f'{kept_below[path]}.') for path in wrappers):
            for path in reversed(wrappers):  # innermost first, so that outer prefixes still match
                name = path + name.removeprefix(kept_below[path])
            yield name, spec


def _tied(name: str) -> ModelError:
    return ModelError(
        f'{name} is tied to a layer with another adapter or none, and merging would change both; set lora to '
        f"'adapter', or remove the tied layer from target_modules"
    )


def _unknown(path: str, found: object) -> ModelError:
    return ModelError(
        f'{path}: merging {type(found).__module__}.{type(found).__name__} is not supported (supported: lora.Linear, '
        f"Embedding and ConvNd, with or without DoRA, and modules_to_save); set lora to 'adapter'"
    )


@EXPORTERS.register_module()
class NestedLoraExporter(MergedExporter):
    """Exports a ``PreTrainedModel`` with adapters on some parts, such as XTuner's ``InternVL_V1_5``, merged and whole.

    The parts cannot be loaded separately, and other trained weights (InternVL's ``mlp1``) must be saved with them.
    XTuner's ``configs/internvl/v1_5/convert_to_official.py`` does the same.

    Args:
        lora: Only 'merge' is accepted.

    Raises:
        OptionError: Another value was given.
        ModelError: A part is quantized, or has an adapter that cannot be merged.
    """

    options = ('lora',)

    def __init__(self, model: nn.Module, module: str | None, lora: str = 'merge') -> None:
        path, pretrained = find_pretrained(model, module)
        adapters = adapters_in(pretrained)
        if lora != 'merge':
            expected = f"None or 'merge', because {type(pretrained).__name__} has adapters on {sorted(adapters)}, which"
            raise OptionError('lora', f'{expected} cannot be loaded separately', lora)
        super().__init__(model, path, adapters)

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        try:
            _, pretrained = find_pretrained(model, module)
        except ModelError:
            return False
        return bool(adapters_in(pretrained))
