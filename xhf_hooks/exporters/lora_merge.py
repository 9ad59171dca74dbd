"""Merges LoRA adapters into weights, as peft's ``merge_and_unload`` does: the merged model's names, and each merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from xhf_hooks.compat.peft import magnitude_name, uses_dora
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.computed import ComputedTensor
from xhf_hooks.exporters.find_model import base_path, trained_adapter
from xhf_hooks.model import without_wrappers
from xhf_hooks.planning.types import TensorSpec

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer


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
        of_experts: peft's ``ParamWrapper`` of a weight ``(experts, out, in)``, or ``(experts, in, out)`` if transposed.
            The others are ``(experts * rank, in)`` and ``(out, rank * experts)``.
    """

    base: str
    lora_a: str
    lora_b: str
    magnitude: str | None
    scaling: float
    transposed: bool
    of_experts: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.base, self.lora_a, self.lora_b, self.magnitude)))

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight = tensors[self.base]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        a, b = (tensors[name].to(dtype).flatten(1) for name in (self.lora_a, self.lora_b))
        if self.of_experts:
            a, b = a.reshape(len(weight), -1, a.shape[1]), b.reshape(len(b), -1, len(weight))
            merged = torch.einsum(f'ore,eri->{"eio" if self.transposed else "eoi"}', b, a).mul_(self.scaling)
            return merged.add_(weight)
        merged = (b @ a).mul_(self.scaling)  # in place from here on, to save memory
        merged += weight.T if self.transposed else weight.reshape(merged.shape)
        if self.magnitude is not None:
            factor = tensors[self.magnitude].to(dtype).flatten() / torch.linalg.norm(merged, dim=1)
            merged *= factor.unsqueeze(1)
        return (merged.T if self.transposed else merged).reshape(weight.shape)


def merge_adapters(
    model: nn.Module, adapters: Mapping[str, PeftModel], own: Mapping[str, TensorSpec]
) -> tuple[dict[str, TensorSpec], dict[str, ComputedTensor]]:
    """The tensors of the merged model, with trained copies in place of what they replace; merges by source name.

    Args:
        model: The model without the PeftModel around it, if there is one.
        adapters: PeftModels by path in ``model``; '' for the one around it.

    Raises:
        ModelError: An adapter cannot be merged.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import other

    if getattr(model.config, 'moe_implementation', None) == 'shard':
        raise ModelError(
            "merging an adapter into XTuner's sharded experts is not supported; set lora to 'adapter', or train "
            "with moe_implementation='origin'"
        )
    # The base of ModulesToSaveWrapper, which is alone before peft 0.15
    auxiliary = getattr(other, 'AuxiliaryTrainingWrapper', other.ModulesToSaveWrapper)
    trained = {path: trained_adapter(peft_model) for path, peft_model in adapters.items()}
    merges: dict[str, ComputedTensor] = {}
    merged: set[str] = set()
    kept_below = {path: base_path(path) for path in adapters if path}  # by path of the wrapper
    for wrapped_path, module in model.named_modules(remove_duplicate=False):
        path = without_wrappers(wrapped_path)
        adapter = next((name for at, name in trained.items() if not at or path.startswith(f'{at}.')), '')
        if isinstance(module, LoraLayer):
            kept_below[path] = f'{path}.base_layer'
            if adapter in module.r:  # else it has only a frozen one
                weight, merge = _merge_of(path, module, adapter, own)
                if merges.setdefault(merge.base, merge) != merge:
                    raise _tied(weight)
                merged.add(weight)
        elif isinstance(module, other.ModulesToSaveWrapper):
            is_trained = adapter in module.modules_to_save
            kept_below[path] = f'{path}.modules_to_save.{adapter}' if is_trained else f'{path}.original_module'
        elif isinstance(module, (BaseTunerLayer, auxiliary)):
            raise _unknown(path, module)
    for name, spec in own.items():
        if spec.name in merges and name not in merged:
            raise _tied(name)
    return dict(_stripped(own, kept_below)), merges


def _merge_of(path: str, layer: LoraLayer, adapter: str, own: Mapping[str, TensorSpec]) -> tuple[str, WeightMerge]:
    """The name of the weight that a layer adapts, and how it is merged."""
    from peft.tuners.lora import layer as kinds

    with_dora, variant = uses_dora(layer, adapter), getattr(layer, 'lora_variant', {}).get(adapter)
    # Old versions of peft have fewer
    names = ('Linear', 'Embedding', 'Conv1d', 'Conv2d', 'Conv3d', 'ParamWrapper')
    is_known = type(layer) in [getattr(kinds, name, None) for name in names] and (with_dora or variant is None)
    grouped = getattr(layer.get_base_layer(), 'groups', 1) > 1  # which peft cannot merge
    weight, inner = path, layer
    while hasattr(inner, 'base_layer'):  # of several parameters of one module each has its ParamWrapper
        weight, inner = f'{weight}.base_layer', inner.base_layer
    weight = f'{weight}.{getattr(layer, "parameter_name", "weight")}'
    if not is_known or grouped or getattr(layer, 'lora_bias', {}).get(adapter) or weight not in own:
        raise _unknown(path, layer)
    if layer.merged:
        raise ModelError(f'{path}: the adapter is already merged into the live model; call unmerge_adapter()')
    is_embedding = isinstance(layer, kinds.Embedding)
    part = '{}.lora_embedding_{}.{}' if is_embedding else '{}.lora_{}.{}.weight'
    of_experts = getattr(layer, 'num_experts', 1) > 1
    if of_experts:
        transposed = not getattr(layer, '_did_swap_in_out_features', False)  # peft 0.17 and 0.18 never swap
    else:
        transposed = is_embedding or bool(getattr(layer, 'fan_in_fan_out', False))
    return weight, WeightMerge(
        base=own[weight].name,
        lora_a=own[part.format(path, 'A', adapter)].name,
        lora_b=own[part.format(path, 'B', adapter)].name,
        magnitude=own[magnitude_name(path, adapter, own)].name if with_dora else None,
        scaling=layer.scaling[adapter],
        transposed=transposed,
        of_experts=of_experts,
    )


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
        f'{path}: merging {type(found).__module__}.{type(found).__name__} is not supported as configured (supported: '
        f'lora.Linear, Embedding, ParamWrapper and ConvNd without groups, with or without DoRA but without lora_bias, '
        f"and modules_to_save); set lora to 'adapter'"
    )
