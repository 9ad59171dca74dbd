"""Which elements of a tensor each rank holds, by the mesh that the ranks form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Axis:
    """A dimension of the mesh that the ranks form: ``rank // stride % size`` is a rank's place along it.

    Attributes:
        each: Number of elements in each of the ``size`` parts.
        holds_copies: Every rank along it holds all the parts, and writes or sends one of them.
    """

    stride: int
    size: int
    each: int
    holds_copies: bool = False

    def place_of(self, rank: int) -> int:
        return rank // self.stride % self.size


@dataclass(frozen=True)
class Spread:
    """Which consecutive elements of a tensor each rank holds.

    Every engine splits something flat into equal parts: a parameter (ZeRO-3), rows (FSDP2), or a flat buffer that
    holds many tensors (FSDP1, the fp32 masters of ZeRO-1 and 2).

    Attributes:
        numel: Number of elements of the tensor.
        each: Number of elements of the flat buffer on each rank, if the parts are in rank order.
        skipped: Number of elements of the flat buffer before this tensor.
        axes: The splits, the outermost first, if the parts are not in rank order or ranks hold copies.
    """

    numel: int
    each: int
    skipped: int = 0
    axes: tuple[Axis, ...] = ()

    def held_by(self, rank: int, *, with_copies: bool = False) -> range:
        """The elements of the tensor that a rank writes or sends, or all that it holds."""
        start, end = -self.skipped, self.numel
        for axis in self.axes or (Axis(1, rank + 1, self.each),):
            if not (with_copies and axis.holds_copies):
                start += axis.place_of(rank) * axis.each
                end = min(end, start + axis.each)
        start = min(max(0, start), self.numel)
        return range(start, max(start, end))

    @property
    def holders(self) -> range:
        """The ranks that hold any elements, and possibly some that do not."""
        if not self.numel:
            return range(0)
        if self.axes:
            return range(math.prod(axis.size for axis in self.axes))
        return range(self.skipped // self.each, -(-(self.skipped + self.numel) // self.each))

    @property
    def copied(self) -> tuple[tuple[int, int], ...]:
        """Stride and size of the axes along which ranks hold copies."""
        return tuple((axis.stride, axis.size) for axis in self.axes if axis.holds_copies)

    @property
    def on_every_rank(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return bool(self.axes) and all(axis.holds_copies for axis in self.axes)

    def first_holder(self, rank: int) -> int:
        """The first of the ranks that hold what this rank holds."""
        return rank - sum(rank // stride % size * stride for stride, size in self.copied)

    def within(self, part: range) -> Spread:
        """The spread of a range of the elements, counted from the start of the range."""
        return replace(self, numel=len(part), skipped=self.skipped + part.start)


def on_one_rank(numel: int, rank: int) -> Spread:
    """The spread of a tensor that only ``rank`` holds."""
    each = max(1, numel)
    return Spread(numel, each, rank * each)


def spread_over(numel: int, splits: Iterable[tuple[int, int, int]], world_size: int, skipped: int = 0) -> Spread | None:
    """The spread of elements that are split along some dimensions of a mesh of all ranks, and copied along the others.

    Args:
        splits: Stride, size and part of each dimension (:class:`Axis`), the outermost split first.
        world_size: Number of all ranks.
        skipped: As in :class:`Spread`.

    Returns:
        None if such ranks form no mesh.
    """
    axes = [Axis(*split) for split in splits]
    each = axes[-1].each if axes else max(1, numel)
    axes = [axis for axis in axes if axis.size > 1]
    ends = [(1, 1), *sorted((axis.stride, axis.stride * axis.size) for axis in axes), (world_size, 0)]
    gaps = [(end, start) for (_, end), (start, _) in pairwise(ends)]
    if any(start % end for end, start in gaps):
        return None
    if axes == [Axis(1, world_size, each)]:
        return Spread(numel, each, skipped)
    for end, start in gaps:
        if start > end:
            each = -(-each // (start // end))
            axes.append(Axis(end, start // end, each, holds_copies=True))
    return Spread(numel, each, skipped, tuple(axes))


def mesh_strides(ranks: np.ndarray) -> tuple[int, ...] | None:
    """How the ranks of this rank's mesh grow along each of its dimensions.

    Returns:
        None if these are not dimensions of a mesh of all ranks in order.
    """
    first, sizes = ranks.flat[0], ranks.shape
    strides = [int(np.take(ranks, 1, dim).flat[0] - first) if size > 1 else 1 for dim, size in enumerate(sizes)]
    expected = first + sum(index * stride for index, stride in zip(np.indices(sizes), strides, strict=True))
    starts = [first // stride % size for stride, size in zip(strides, sizes, strict=True) if stride > 0]
    return tuple(strides) if starts == [0] * len(sizes) and (ranks == expected).all() else None
