"""Tensors that are computed from several of the source and written in place of one of them.

Until the last step such a tensor is the source's own: it is named, compared, converted and planned like any other. Only
then do its entries read all that it is computed from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from xhf_hooks.planning.types import Combine, ExportEntry


class ComputedTensor(Protocol):
    """Computes one tensor. Called on the rank that writes, with gathered tensors by their names in the source.

    Attributes:
        base: The tensor of the source that it replaces.
        reads: What it is computed from, the base included.
    """

    @property
    def base(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor: ...


def with_computed(entries: Sequence[ExportEntry], computed: Mapping[str, ComputedTensor]) -> list[ExportEntry]:
    """Make entries that read a replaced tensor read its inputs and compute it first.

    Args:
        computed: By name of the replaced tensor.
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
