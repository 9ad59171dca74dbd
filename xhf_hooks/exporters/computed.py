"""Tensors that are computed from several source tensors and replace one of them, such as merged LoRA weights.

The replaced tensor is named, compared, converted and planned like any other. The last step adds the other inputs to
its entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from xhf_hooks.planning.types import Combine, ExportEntry


class ComputedTensor(Protocol):
    """Computes one tensor from gathered tensors, given by source name. Called on the rank that writes.

    Attributes:
        base: The source tensor that it replaces.
        reads: Its inputs, including the base.
    """

    @property
    def base(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor: ...


def with_computed(entries: Sequence[ExportEntry], computed: Mapping[str, ComputedTensor]) -> list[ExportEntry]:
    """Make entries that read a replaced tensor read its inputs instead, and compute it first.

    Args:
        computed: Computations by the name of the tensor that they replace.
    """
    made: dict[int | str, _ComputeFirst] = {}
    result = []
    for entry in entries:
        found = [computed[name] for name in entry.reads if name in computed]
        if found:
            key = entry.hf_name if entry.combine is None else id(entry.combine)
            then = entry.combine or _Renamed(entry.hf_name, entry.reads[0])
            combine = made.setdefault(key, _ComputeFirst(tuple(found), then))
            reads = [*entry.reads, *(name for one in found for name in one.reads)]
            entry = replace(entry, reads=tuple(dict.fromkeys(reads)), combine=combine, source_offset=None)
        result.append(entry)
    return result


@dataclass(frozen=True)
class _ComputeFirst:
    found: tuple[ComputedTensor, ...]
    then: Combine

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self.then({**tensors, **{one.base: one(tensors) for one in self.found}})


@dataclass(frozen=True)
class _Renamed:
    hf_name: str
    read: str

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {self.hf_name: tensors[self.read]}
