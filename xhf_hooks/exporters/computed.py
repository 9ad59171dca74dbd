"""Tensors that go out in place of one that the source holds, made of it and of others.

To everything but the last step such a tensor is the source's own: it is named, compared, converted and planned
like any other, and only then do its entries read all that it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from xhf_hooks.planning.types import Combine, ExportEntry


class Derived(Protocol):
    """How to make one. Called on the rank that writes, with gathered tensors by their names in the source.

    Attributes:
        base: The tensor of the source that it replaces.
        reads: What it is made of, the base included.
    """

    @property
    def base(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor: ...


def derive(entries: Sequence[ExportEntry], derived: Mapping[str, Derived]) -> list[ExportEntry]:
    """Entries that read a replaced tensor read its parts instead, and make it first.

    Args:
        derived: By name of the replaced tensor.
    """
    made: dict[int | str, _DeriveFirst] = {}
    result = []
    for entry in entries:
        found = [derived[name] for name in entry.reads if name in derived]
        if found:
            key = entry.hf_name if entry.combine is None else id(entry.combine)
            then = entry.combine or _Renamed(entry.hf_name, entry.reads[0])
            combine = made.setdefault(key, _DeriveFirst(tuple(found), then))
            reads = [*entry.reads, *(name for one in found for name in one.reads)]
            entry = replace(entry, reads=tuple(dict.fromkeys(reads)), combine=combine, source_offset=None)
        result.append(entry)
    return result


@dataclass(frozen=True)
class _DeriveFirst:
    found: tuple[Derived, ...]
    then: Combine

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self.then({**tensors, **{one.base: one(tensors) for one in self.found}})


@dataclass(frozen=True)
class _Renamed:
    hf_name: str
    read: str

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {self.hf_name: tensors[self.read]}
