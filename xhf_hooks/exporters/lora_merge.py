"""Merges LoRA adapters into weights, as peft's ``merge_and_unload`` does: the merged model's names, and each merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xhf_hooks.compat.peft import magnitude_name, uses_dora
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.find_model import adapters_in_use, base_path
from xhf_hooks.model import without_wrappers
from xhf_hooks.planning.types import TensorSpec

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper


@dataclass(frozen=True)
class LowRankUpdate:
    """The update that one adapter adds to a weight.

    Attributes:
        lora_a: Source name of the first factor, ``(rank, in, ...)``.
        lora_b: Source name of the second factor, ``(out, rank, ...)``.
        magnitude: Source name of DoRA's magnitudes, ``out`` elements; None without DoRA.
        scaling: Factor of their product.
    """

    lora_a: str
    lora_b: str
    magnitude: str | None
    scaling: float


@dataclass(frozen=True)
class WeightMerge:
    """Computes ``W + scaling * B A`` of one weight in fp32 (or wider), without rounding. Only reads the live model.

    The operations are those of peft's ``get_delta_weight``, ``merge`` and DoRA variants (``tuners/lora/layer.py``,
    ``variants.py``, ``dora.py``), so that fp32 linear layers equal peft's bit for bit. For 16-bit models peft rounds
    product, sum and norm; here the result is rounded once, on write.

    Attributes:
        base: Source name of the weight, ``(out, in, ...)``.
        updates: The update of each active adapter, in the order in which peft merges them.
        transposed: The weight is stored as ``(in, out)``: embeddings, and GPT-2's Conv1D.
        of_experts: peft's ``ParamWrapper`` of a weight ``(experts, out, in)``, or ``(experts, in, out)`` if transposed.
            The factors are ``(experts * rank, in)`` and ``(out, rank * experts)``.
    """

    base: str
    updates: tuple[LowRankUpdate, ...]
    transposed: bool
    of_experts: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        names = [name for one in self.updates for name in (one.lora_a, one.lora_b, one.magnitude)]
        return tuple(filter(None, (self.base, *names)))

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight = tensors[self.base]
        for update in self.updates:
            weight = self._updated(weight, update, tensors)
        return weight

    def _updated(
        self, weight: torch.Tensor, update: LowRankUpdate, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        a, b = (tensors[name].to(dtype).flatten(1) for name in (update.lora_a, update.lora_b))
        if self.of_experts:
            a, b = a.reshape(len(weight), -1, a.shape[1]), b.reshape(len(b), -1, len(weight))
            merged = torch.einsum(f'ore,eri->{"eio" if self.transposed else "eoi"}', b, a).mul_(update.scaling)
            return merged.add_(weight)
        merged = (b @ a).mul_(update.scaling)  # in place from here on, to save memory
        merged += weight.T if self.transposed else weight.reshape(merged.shape)
        if update.magnitude is not None:
            factor = tensors[update.magnitude].to(dtype).flatten() / torch.linalg.norm(merged, dim=1)
            merged *= factor.unsqueeze(1)
        return (merged.T if self.transposed else merged).reshape(weight.shape)


@dataclass(frozen=True)
class BiasMerge:
    """Adds the biases of second factors (``lora_bias``) to that of the layer.

    Attributes:
        base: Source name of the layer's bias.
        added: Source name of the bias, and its scaling, of each active adapter.
    """

    base: str
    added: tuple[tuple[str, float], ...]

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.base, *(name for name, _ in self.added))

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        bias = tensors[self.base]
        merged = bias.to(torch.promote_types(bias.dtype, torch.float32))
        for name, scaling in self.added:
            merged = merged + tensors[name].to(merged.dtype) * scaling
        return merged


@dataclass(frozen=True)
class RowsMerge:
    """Puts trained rows in place of those of an embedding (``trainable_token_indices``).

    Attributes:
        base: Source name of the embedding, ``(rows, dim)``.
        rows: Source name of the trained rows, and their numbers, of each active adapter.
    """

    base: str
    rows: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.base, *(name for name, _ in self.rows))

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight = tensors[self.base].clone()
        for name, numbers in self.rows:
            weight[list(numbers)] = tensors[name].to(weight)
        return weight


Merge = WeightMerge | BiasMerge | RowsMerge


def merge_adapters(
    model: nn.Module, adapters: Mapping[str, PeftModel], own: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec | Merge]:
    """The tensors of the merged model by name, with trained copies and merges in place of what they replace.

    Names that are tied to an adapted one have a merge only if they are adapted, too: then values differ, and the names
    are no longer tied. (``merge_and_unload`` changes the shared weight, so that both names get the sum.)

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
            "merging an adapter into sharded experts is not supported; set lora to 'adapter', or train "
            "with moe_implementation='origin'"
        )
    # The base of ModulesToSaveWrapper, which is alone before peft 0.15
    auxiliary = getattr(other, 'AuxiliaryTrainingWrapper', other.ModulesToSaveWrapper)
    tokens = _kinds_of_trainable_tokens()
    for peft_model in adapters.values():
        require_lora(peft_model)
    merges: dict[str, Merge] = {}
    kept_below = {path: base_path(path) for path in adapters if path}  # by path of the wrapper
    for wrapped_path, module in model.named_modules(remove_duplicate=False):
        path = without_wrappers(wrapped_path)
        if isinstance(module, LoraLayer):
            kept_below[path] = f'{path}.base_layer'
            active = [name for name in module.active_adapters if name in module.r]
            if active:  # else it has only inactive ones
                found = _merges_of(path, module, active, own)
                if not found.keys().isdisjoint(merges):  # two layers around one weight
                    raise _unknown(path, module)
                merges |= found
        elif isinstance(module, tokens):
            has_adapter = hasattr(module, 'token_adapter')  # it wraps the layer that has the rows
            kept_below[path] = f'{path}.token_adapter' if has_adapter else f'{path}.base_layer'
            if not has_adapter:
                merges |= _merge_of_rows(path, module, own)
        elif isinstance(module, other.ModulesToSaveWrapper):
            kept_below[path] = f'{path}.{_copy_in_use(module) or "original_module"}'
        elif isinstance(module, (BaseTunerLayer, auxiliary)):
            raise _unknown(path, module)
    return {name: merges.get(own_name, own[own_name]) for name, own_name in _stripped(own, kept_below)}


def _kinds_of_trainable_tokens() -> tuple[type, ...]:
    """peft's wrapper of an embedding with trained rows, and its layer, as since 0.15."""
    try:
        from peft.tuners.trainable_tokens import TrainableTokensLayer
        from peft.utils.other import TrainableTokensWrapper
    except ImportError:
        return ()
    return TrainableTokensWrapper, TrainableTokensLayer


def require_lora(peft_model: PeftModel) -> None:
    """Refuse to merge other adapters than those of LoRA.

    Raises:
        ModelError: An active adapter is of another kind.
    """
    kinds = {name: str(peft_model.peft_config[name].peft_type.value) for name in adapters_in_use(peft_model)}
    if set(kinds.values()) != {'LORA'}:
        kind = type(peft_model.get_base_model()).__name__
        raise ModelError(
            f"merging needs adapters of LoRA, found {kinds} on {kind}; set lora to 'adapter', or train with LoraConfig"
        )


def _copy_in_use(wrapper: ModulesToSaveWrapper) -> str | None:
    """The path, in the wrapper, of the copy that makes its outputs; None if that is the original module."""
    active = wrapper.active_adapter
    names = [active] if isinstance(active, str) else list(active)
    # As in peft's AuxiliaryTrainingWrapper.forward
    is_copy = bool(names) and all(name in wrapper.modules_to_save for name in names)
    return f'modules_to_save.{names[0]}' if is_copy else None


def _merge_of_rows(path: str, layer: Any, own: Mapping[str, TensorSpec]) -> dict[str, Merge]:
    """How the trained rows of an embedding are merged, by the name of its weight; {} if no active adapter has any."""
    weight = f'{path}.base_layer.weight'
    active = [name for name in layer.active_adapters if name in layer.token_indices]
    if active and weight not in own:
        raise _unknown(path, layer)
    _refuse_merged(path, layer)
    delta = f'{path}.trainable_tokens_delta'
    rows = tuple((own[f'{delta}.{name}'].name, tuple(map(int, layer.token_indices[name]))) for name in active)
    return {weight: RowsMerge(own[weight].name, rows)} if rows else {}


def _merges_of(path: str, layer: LoraLayer, active: Sequence[str], own: Mapping[str, TensorSpec]) -> dict[str, Merge]:
    """How a layer's weight is merged, and its bias with ``lora_bias``, by their names.

    Args:
        active: The active adapters that the layer has.
    """
    from peft.tuners.lora import layer as kinds

    # Old versions of peft have fewer
    names = ('Linear', 'Embedding', 'Conv1d', 'Conv2d', 'Conv3d', 'ParamWrapper')
    with_dora = {name: uses_dora(layer, name) for name in active}
    variants = getattr(layer, 'lora_variant', {})
    is_known = type(layer) in [getattr(kinds, name, None) for name in names]
    is_known &= all(with_dora[name] or variants.get(name) is None for name in active)
    if len(active) > 1 and any(with_dora.values()):
        raise ModelError(
            f'{path}: DoRA beside another active adapter cannot be merged: {list(active)}. Each scales what the model '
            f"computes without the other; set lora to 'adapter', or activate one of them"
        )
    grouped = getattr(layer.get_base_layer(), 'groups', 1) > 1  # which peft cannot merge
    weight, inner = path, layer
    while hasattr(inner, 'base_layer'):  # of several parameters of one module each has its ParamWrapper
        weight, inner = f'{weight}.base_layer', inner.base_layer
    weight = f'{weight}.{getattr(layer, "parameter_name", "weight")}'
    with_bias = [name for name in active if getattr(layer, 'lora_bias', {}).get(name)]
    bias = f'{path}.base_layer.bias'
    has_unknown_bias = bool(with_bias) and (bias not in own or any(with_dora.values()))
    if not is_known or grouped or has_unknown_bias or weight not in own:
        raise _unknown(path, layer)
    _refuse_merged(path, layer)
    is_embedding = isinstance(layer, kinds.Embedding)
    part = '{}.lora_embedding_{}.{}' if is_embedding else '{}.lora_{}.{}.weight'
    of_experts = getattr(layer, 'num_experts', 1) > 1
    if of_experts:
        transposed = not getattr(layer, '_did_swap_in_out_features', False)  # peft 0.17 and 0.18 never swap
    else:
        transposed = is_embedding or bool(getattr(layer, 'fan_in_fan_out', False))
    updates = tuple(
        LowRankUpdate(
            lora_a=own[part.format(path, 'A', name)].name,
            lora_b=own[part.format(path, 'B', name)].name,
            magnitude=own[magnitude_name(path, name, own)].name if with_dora[name] else None,
            scaling=layer.scaling[name],
        )
        for name in active
    )
    merges: dict[str, Merge] = {weight: WeightMerge(own[weight].name, updates, transposed, of_experts)}
    if with_bias:
        added = tuple((own[f'{path}.lora_B.{name}.bias'].name, layer.scaling[name]) for name in with_bias)
        merges[bias] = BiasMerge(own[bias].name, added)
    return merges


def _refuse_merged(path: str, layer: Any) -> None:
    if layer.merged:
        raise ModelError(f'{path}: the adapter is already merged into the live model; call unmerge_adapter()')


def _stripped(own: Mapping[str, TensorSpec], kept_below: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names in the merged model, and those in the live one: the path of a wrapper in place of what it keeps."""
    for own_name in own:
        name = own_name
        parts = name.split('.')
        above = ['.'.join(parts[:end]) for end in range(1, len(parts))]
        wrappers = [path for path in above if path in kept_below]
        if all(name.startswith(f'{kept_below[path]}.') for path in wrappers):
            for path in reversed(wrappers):  # innermost first, so that outer prefixes still match
                name = path + name.removeprefix(kept_below[path])
            yield name, own_name


def _unknown(path: str, found: object) -> ModelError:
    return ModelError(
        f'{path}: merging {type(found).__module__}.{type(found).__name__} is not supported as configured (supported: '
        f'lora.Linear, Embedding, ParamWrapper and ConvNd without groups, with DoRA or lora_bias, modules_to_save '
        f"and trainable_token_indices); set lora to 'adapter'"
    )
