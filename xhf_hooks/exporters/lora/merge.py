"""Exports a full model with a LoRA adapter merged into its weights, one weight at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.huggingface import HuggingFaceExporter, quantization_of
from xhf_hooks.model import without_wrappers
from xhf_hooks.planning.types import TensorSpec

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import PretrainedConfig


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


@dataclass(frozen=True)
class BiasMerge:
    """Computes ``b + scaling * b_B``, for adapters with ``lora_bias``."""

    base: str
    lora_bias: str
    scaling: float

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.base, self.lora_bias)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        bias = tensors[self.base]
        dtype = torch.promote_types(bias.dtype, torch.float32)
        return tensors[self.lora_bias].to(dtype).mul(self.scaling) + bias


def base_path(path: str) -> str:
    """The path of the base model in the PeftModel at ``path``."""
    return f'{path}.base_model.model'.removeprefix('.')


def require_not_quantized(base_model: nn.Module) -> None:
    """Refuse to merge into quantized weights.

    Raises:
        ModelError: The weights are quantized.
    """
    quantized = quantization_of(base_model)
    if quantized is not None:
        raise ModelError(
            f'the base model is quantized ({quantized}), and an adapter cannot be merged into such weights '
            f"without loss; set lora to 'adapter' and merge into the unquantized model later"
        )


class MergedExporter(HuggingFaceExporter):
    """Writes the same files as ``merge_and_unload`` and ``save_pretrained``.

    Args:
        path: Path of the PeftModel in the trained model.
        adapter: The adapter's name in the PeftModel.

    Raises:
        ModelError: The base model is quantized, or a layer has an unsupported kind of adapter.
    """

    def __init__(self, model: nn.Module, path: str, peft_model: PeftModel, adapter: str) -> None:
        require_not_quantized(peft_model.get_base_model())
        if getattr(peft_model.get_base_model().config, 'moe_implementation', None) == 'shard':
            raise ModelError(
                "merging an adapter into XTuner's sharded experts is not supported; set lora to 'adapter', or train "
                "with moe_implementation='origin'"
            )
        super().__init__(model, base_path(path))
        self._adapters = {'': adapter}  # the name of the adapter below each path

    def _own_names(self, specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
        """The names of the merged model: without adapters, and with replacements instead of replaced modules."""
        from peft.tuners.lora import LoraLayer
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import other

        # The base of ModulesToSaveWrapper, which is alone before peft 0.15
        auxiliary = getattr(other, 'AuxiliaryTrainingWrapper', other.ModulesToSaveWrapper)
        own = super()._own_names(specs)
        self._computed = {}
        kept_below = {path: base_path(path) for path in self._adapters if path}  # by path of the wrapper
        merged: set[str] = set()
        for wrapped_path, module in self._model.named_modules(remove_duplicate=False):
            path = without_wrappers(wrapped_path)
            if isinstance(module, LoraLayer):
                kept_below[path] = f'{path}.base_layer'
                merged |= self._note_merges(path, module, own)
            elif isinstance(module, other.ModulesToSaveWrapper):
                kept_below[path] = f'{path}.modules_to_save.{self._adapter_at(path)}'
            elif isinstance(module, (BaseTunerLayer, auxiliary)):
                raise _unknown(path, module)
        _require_only(merged, own, self._computed)
        return dict(_stripped(own, kept_below))

    def _adapter_at(self, path: str) -> str:
        return next(name for above, name in self._adapters.items() if not above or path.startswith(f'{above}.'))

    def _exported_config(self, own: dict[str, TensorSpec], dtype: str | None) -> PretrainedConfig:
        """Set tie_word_embeddings to False if ``modules_to_save`` untied the embeddings."""
        config = super()._exported_config(own, dtype)
        outputs = self._model.get_output_embeddings()
        if outputs is not None and self._model.get_input_embeddings().weight is not outputs.weight:
            for part in (config, config.get_text_config()):
                if getattr(part, 'tie_word_embeddings', False):
                    part.tie_word_embeddings = False
        return config

    def _note_merges(self, path: str, layer: LoraLayer, own: dict[str, TensorSpec]) -> set[str]:
        """Record the merges of an adapted layer; returns the relative names of the merged tensors."""
        from peft.tuners.lora import layer as kinds

        adapter = self._adapter_at(path)
        # Before 0.15 peft has neither Conv1d nor variants, before 0.14 neither Conv3d nor lora_bias
        names = ('Linear', 'Embedding', 'Conv1d', 'Conv2d', 'Conv3d')
        if type(layer) not in [getattr(kinds, name, None) for name in names]:
            raise _unknown(path, layer)
        with_dora, variant = layer.use_dora[adapter], getattr(layer, 'lora_variant', {}).get(adapter)
        if variant is not None and not with_dora:
            raise _unknown(path, variant)
        if layer.merged:
            raise ModelError(f'{path}: the adapter is already merged into the live model; call unmerge_adapter()')
        base_layer = layer.get_base_layer()
        if getattr(base_layer, 'groups', 1) > 1:
            raise ModelError(f"{path}: peft cannot merge a convolution with groups; set lora to 'adapter'")

        is_embedding = isinstance(layer, kinds.Embedding)
        part = '{}.lora_embedding_{}.{}' if is_embedding else '{}.lora_{}.{}.weight'
        lora_a, lora_b = (own[part.format(path, letter, adapter)].name for letter in 'AB')
        magnitude = own[f'{path}.lora_magnitude_vector.{adapter}.weight'].name if with_dora else None
        transposed = is_embedding or bool(getattr(layer, 'fan_in_fan_out', False))
        weight, bias = f'{path}.base_layer.weight', f'{path}.base_layer.bias'
        scaling = layer.scaling[adapter]
        made: dict[str, WeightMerge | BiasMerge] = {
            weight: WeightMerge(own[weight].name, lora_a, lora_b, magnitude, scaling, transposed)
        }
        if getattr(layer, 'lora_bias', {}).get(adapter):
            if bias not in own:
                raise ModelError(f"{path}: lora_bias without a bias in the base layer; set lora to 'adapter'")
            made[bias] = BiasMerge(own[bias].name, own[f'{path}.lora_B.{adapter}.bias'].name, scaling)
        for name, merge in made.items():
            if self._computed.setdefault(merge.base, merge) != merge:
                raise _tied(name)
        return set(made)


def _stripped(own: Mapping[str, TensorSpec], kept_below: Mapping[str, str]) -> list[tuple[str, TensorSpec]]:
    """Rename the kept tensors of each wrapper to the wrapper's path, and drop the others."""
    names = []
    for name, spec in own.items():
        parts = name.split('.')
        above = ['.'.join(parts[:end]) for end in range(1, len(parts))]
        wrappers = [path for path in above if path in kept_below]
        if all(name.startswith(f'{kept_below[path]}.') for path in wrappers):
            for path in reversed(wrappers):  # innermost first, so that outer prefixes still match
                name = path + name.removeprefix(kept_below[path])
            names.append((name, spec))
    return names


def _require_only(merged: set[str], own: Mapping[str, TensorSpec], merges: Mapping[str, object]) -> None:
    """Refuse a tied weight that is adapted under only one of its names."""
    for name, spec in own.items():
        if spec.name in merges and name not in merged:
            raise _tied(name)


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
