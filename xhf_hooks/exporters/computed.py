"""Tensors that are computed from several tensors, such as merged LoRA weights.

A computed tensor replaces one of its inputs: it is named, compared, converted and planned like any other, and the last
step adds the other inputs to its entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from xhf_hooks.planning.types import Combine, ExportEntry

_FP32_NBYTES = 4  # computed in fp32; the cast overlaps the previous write


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
    """Make entries that read a tensor which one of ``computed`` replaces read its inputs instead, and compute it."""
    combines: dict[int | str, Combine] = {}  # entries with one combine keep one
    result = []
    for entry in entries:
        found = [computed[name] for name in entry.reads if name in computed]
        if found:
            key = entry.hf_name if entry.combine is None else id(entry.combine)
            combine = combines.setdefault(key, _computing_first(found, entry))
            reads = [*entry.reads, *(name for one in found for name in one.reads)]
            entry = replace(entry, reads=tuple(dict.fromkeys(reads)), combine=combine, source_offset=None)
        result.append(entry)
    return result


def _computing_first(found: Sequence[ComputedTensor], entry: ExportEntry) -> Combine:
    def combine(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        tensors = {**tensors, **{one.base: one(tensors) for one in found}}
        return {entry.hf_name: tensors[entry.reads[0]]} if entry.combine is None else entry.combine(tensors)

    return combine


def computing_nbytes(entries: Sequence[ExportEntry], computed: Mapping[str, ComputedTensor]) -> int:
    """Most memory for outputs that are made together of computed tensors: some are cut out of them as copies."""
    together: dict[int, list[ExportEntry]] = {}
    for entry in entries:
        if not computed.keys().isdisjoint(entry.reads):
            together.setdefault(id(entry.combine), []).append(entry)
    return max(map(_combine_nbytes, together.values()), default=0)


def _combine_nbytes(together: Sequence[ExportEntry]) -> int:
    computed = sum(math.prod(entry.shape) for entry in together) * _FP32_NBYTES
    return computed * min(len(together), 2) + 2 * max(entry.nbytes for entry in together)
