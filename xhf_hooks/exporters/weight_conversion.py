"""Renames and un-fuses weights with transformers' own mapping, traced on meta tensors.

transformers 5 holds some weights, such as fused experts, in a different form in memory than in checkpoints;
``save_pretrained`` converts them with ``transformers.core_model_loading.revert_weight_conversion``. Here that function
runs once on meta tensors that record their inputs. This gives the name, shape and sources of every output before any
tensor is gathered, and groups of outputs that can be converted independently. An output that is a view of consecutive
elements of one input, such as one of several fused experts, needs no conversion.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from xhf_hooks.compat.transformers import converts_weights, saved_names
from xhf_hooks.errors import ModelError
from xhf_hooks.format.dtypes import TORCH_DTYPES, dtype_code
from xhf_hooks.planning.types import ExportEntry, TensorSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUMBERS = re.compile(r'\d+')


def convert_specs(model: PreTrainedModel, specs: Mapping[str, TensorSpec]) -> list[ExportEntry]:
    """The entries that ``save_pretrained`` would write for these tensors, in its order, with the dtypes of the specs.

    Args:
        model: The model on the meta device; some conversions read its shapes.
        specs: Specs by name in the model, which may differ from the name in the source.
    """
    if not converts_weights():
        return [_unchanged(hf_name, specs[name]) for hf_name, name in saved_names(model, list(specs)).items()]
    from transformers.core_model_loading import revert_weight_conversion

    inputs = {name: _traced_meta(name, spec) for name, spec in specs.items()}
    outputs = revert_weight_conversion(model, dict(inputs))
    groups = _groups(model, specs, inputs, outputs)
    entries = []
    for hf_name, tensor in outputs.items():
        group = groups.get(hf_name)
        if group is None:
            entries.append(_unchanged(hf_name, specs[next(iter(tensor.sources))]))
        else:
            reads = tuple(spec.name for spec in group.inputs.values())
            with torch._C.DisableTorchFunctionSubclass():
                shape, dtype = tuple(tensor.shape), dtype_code(tensor.dtype)
            first = _first_of_run(tensor, [inputs[name] for name in group.inputs])
            entries.append(ExportEntry(hf_name, shape, dtype, reads, group, source_offset=first))
    return entries


def _first_of_run(tensor: _TracedTensor, group_inputs: Sequence[_TracedTensor]) -> int | None:
    """The offset of an output that is a contiguous part of the group's only input; None for any other output."""
    if len(group_inputs) != 1:
        return None
    (read,) = group_inputs
    with torch._C.DisableTorchFunctionSubclass():
        is_view = _storage_of(tensor) == _storage_of(read) and tensor.dtype == read.dtype
        as_it_was = read._version == 0  # no operation in place
        return tensor.storage_offset() if is_view and as_it_was and tensor.is_contiguous() else None


@dataclass(eq=False)
class ConversionGroup:
    """Converts a group of inputs; it is the ``combine`` of their entries.

    Attributes:
        inputs: Specs by name in the model.
        shapes: Shapes of the expected outputs by HF name.
    """

    model: PreTrainedModel
    inputs: dict[str, TensorSpec]
    shapes: dict[str, tuple[int, ...]]

    @property
    def form(self) -> Hashable:
        """A key that is equal for the groups of all layers: names without numbers, shapes and dtypes."""
        inputs = [(_NUMBERS.sub('*', name), spec.shape, spec.dtype) for name, spec in self.inputs.items()]
        return *inputs, frozenset(Counter((_NUMBERS.sub('*', n), shape) for n, shape in self.shapes.items()).items())

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert gathered tensors, given by source name. Runs on: the rank that writes."""
        from transformers.core_model_loading import revert_weight_conversion

        outputs = revert_weight_conversion(self.model, {n: tensors[s.name] for n, s in self.inputs.items()})
        found = _shapes(outputs)
        if found != self.shapes:
            differing = sorted(set(found.items()) ^ set(self.shapes.items()))[:6]
            raise ModelError(
                f'transformers converts {sorted(self.inputs)} alone to other tensors than as part of the full model '
                f'(differences: {differing}); this architecture needs its own exporter'
            )
        return outputs


def _unchanged(hf_name: str, spec: TensorSpec) -> ExportEntry:
    return ExportEntry(hf_name, spec.shape, spec.dtype, (spec.name,))


def _groups(
    model: PreTrainedModel,
    specs: Mapping[str, TensorSpec],
    inputs: Mapping[str, _TracedTensor],
    outputs: Mapping[str, _TracedTensor],
) -> dict[str, ConversionGroup]:
    """Groups by HF name, for outputs that were computed rather than just renamed."""
    computed: dict[frozenset[str], list[str]] = {}  # names of outputs by what they are made of
    for hf_name, tensor in outputs.items():
        if len(tensor.sources) != 1 or tensor is not inputs[next(iter(tensor.sources))]:
            computed.setdefault(tensor.sources, []).append(hf_name)
    all_sources = frozenset[str]().union(*computed)
    if sum(map(len, computed)) > len(all_sources):  # some share an input
        computed = {all_sources: [hf_name for hf_names in computed.values() for hf_name in hf_names]}

    shapes = _shapes(outputs)
    position = {name: number for number, name in enumerate(specs)}
    converted: set[Any] = set()

    def group_of(*parts: frozenset[str]) -> ConversionGroup:
        """Raises unless these can be converted without the others."""
        sources = sorted(frozenset[str]().union(*parts), key=position.__getitem__)
        group = ConversionGroup(
            model,
            {name: specs[name] for name in sources},
            {hf_name: shapes[hf_name] for part in parts for hf_name in computed[part]},
        )
        if group.form not in converted:  # layers of experts are alike: one is tried
            group({spec.name: _traced_meta(name, spec) for name, spec in group.inputs.items()})
            converted.add(group.form)
        return group

    groups: dict[str, ConversionGroup] = {}
    for sources, hf_names in computed.items():
        if groups.keys().isdisjoint(hf_names):
            group = _smallest_group(sources, list(computed), group_of)
            groups.update(dict.fromkeys(group.shapes, group))
    return groups


def _smallest_group(
    sources: frozenset[str], parts: Sequence[frozenset[str]], group_of: Callable[..., ConversionGroup]
) -> ConversionGroup:
    """The group of these sources, and of others without which transformers does not convert them.

    Such as the experts for text of a layer and those for images in Ernie 4.5 VL: in the files they are one list. One
    other, or else all, are looked for in the same module, then in the one around it, and so on.
    """
    try:
        return group_of(sources)
    except Exception as caught:  # of any type: transformers' operations refuse groups that lack a tensor in many ways
        error = caught
    around = min(sources)
    while around:
        around = around.rpartition('.')[0]
        prefix = f'{around}.' if around else ''
        near = [part for part in parts if part != sources and all(name.startswith(prefix) for name in part)]
        for others in (*((part,) for part in near), near):
            with suppress(Exception):  # as above
                return group_of(sources, *others)
    raise error


class _TracedTensor(torch.Tensor):
    """A tensor that records the names of its inputs.

    :meth:`~torch.Tensor.contiguous` copies nothing, so that views stay views.
    """

    sources: frozenset[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        result = super().__torch_function__(func, types, args, kwargs or {})
        made = _tensors_in(result)
        if not made:
            return result
        operands = _tensors_in((args, kwargs))
        sources = operands[0].sources if len(operands) == 1 else frozenset().union(*(one.sources for one in operands))
        for tensor in made:
            if not any(tensor is operand for operand in operands):
                tensor.sources = sources
        return result


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    with torch._C.DisableTorchFunctionSubclass():
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _storage_of(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # else each of very many tensors asks __torch_function__
        return tensor.untyped_storage()._cdata


def _traced_meta(name: str, spec: TensorSpec) -> _TracedTensor:
    tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device='meta').as_subclass(_TracedTensor)
    tensor.sources = frozenset({name})
    return tensor


def _tensors_in(value: Any) -> list[_TracedTensor]:
    if isinstance(value, _TracedTensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in _tensors_in(item)]
