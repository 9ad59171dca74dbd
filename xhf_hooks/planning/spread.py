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
        holds_replicas: Every rank along it holds all the parts, and writes or sends one of them.
    """

    stride: int
    size: int
    each: int
    holds_replicas: bool = False

    def place_of(self, rank: int) -> int:
        return rank // self.stride % self.size


@dataclass(frozen=True)
class Spread:
    """Which consecutive elements of a tensor each rank holds.

    Every engine splits something flat into equal parts: a parameter (ZeRO-3), rows (FSDP2), or a flat buffer that
    holds many tensors (FSDP1, the fp32 masters of ZeRO-1 and 2).

    Attributes:
        axes: The splits, the outermost first; none if there is one rank.
        skipped: Number of elements of the flat buffer before this tensor.
    """

    numel: int
    axes: tuple[Axis, ...]
    skipped: int = 0

    def held_by(self, rank: int, *, with_replicas: bool = False) -> range:
        """The elements of the tensor that a rank writes or sends, or all that it holds."""
        start, end = -self.skipped, self.numel
        for axis in self.axes:
            if not (with_replicas and axis.holds_replicas):
                start += axis.place_of(rank) * axis.each
                end = min(end, start + axis.each)
        start = min(max(0, start), self.numel)
        return range(start, max(start, end))

    @property
    def holders(self) -> range:
        """The ranks that hold any elements, and possibly some that do not."""
        if not self.numel:
            return range(0)
        if len(self.axes) != 1 or self.axes[0].holds_replicas:
            return range(math.prod(axis.size for axis in self.axes))
        each = self.axes[0].each
        return range(self.skipped // each, -(-(self.skipped + self.numel) // each))

    @property
    def replicated(self) -> tuple[tuple[int, int], ...]:
        """Stride and size of the axes along which ranks hold replicas."""
        return tuple((axis.stride, axis.size) for axis in self.axes if axis.holds_replicas)

    @property
    def on_every_rank(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(axis.holds_replicas for axis in self.axes)

    def is_held_by(self, world_size: int) -> bool:
        """Whether so many ranks hold all elements, in time that grows with neither ranks nor elements."""
        needed = self.skipped + self.numel
        for axis in self.axes:
            if axis.each * axis.size < needed:
                return False
            needed = min(needed, axis.each)
        return math.prod(axis.size for axis in self.axes) == world_size

    def first_holder(self, rank: int) -> int:
        """The first of the ranks that hold what this rank holds."""
        return rank - sum(rank // stride % size * stride for stride, size in self.replicated)

    def within(self, part: range) -> Spread:
        """The spread of a range of the elements, counted from the start of the range."""
        if part == range(self.numel):
            return self
        return replace(self, numel=len(part), skipped=self.skipped + part.start)


def in_rank_order(numel: int, each: int, world_size: int, skipped: int = 0) -> Spread:
    """The spread of what each rank holds ``each`` elements of, one rank after the other."""
    return Spread(numel, (Axis(1, world_size, each),), skipped)


def on_one_rank(numel: int, rank: int, world_size: int) -> Spread:
    """The spread of a tensor that only ``rank`` holds."""
    each = max(1, numel)
    return in_rank_order(numel, each, world_size, rank * each)


def spread_over(numel: int, splits: Iterable[tuple[int, int, int]], world_size: int, skipped: int = 0) -> Spread | None:
    """The spread of elements that are split along some dimensions of a mesh of all ranks, and replicated along others.

    Args:
        splits: Stride, size and part of each dimension (:class:`Axis`), the outermost split first.

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
    for end, start in gaps:
        if start > end:
            each = -(-each // (start // end))
            axes.append(Axis(end, start // end, each, holds_replicas=True))
    return Spread(numel, tuple(axes), skipped)


def mesh_strides(ranks: np.ndarray) -> tuple[int, ...] | None:
    """The stride of ranks along each dimension of this rank's mesh.

    Returns:
        None if these are not dimensions of a mesh of all ranks in order.
    """
    first, sizes = ranks.flat[0], ranks.shape
    strides = [int(np.take(ranks, 1, dim).flat[0] - first) if size > 1 else 1 for dim, size in enumerate(sizes)]
    expected = first + sum(index * stride for index, stride in zip(np.indices(sizes), strides, strict=True))
    starts = [first // stride % size for stride, size in zip(strides, sizes, strict=True) if stride > 0]
    return tuple(strides) if starts == [0] * len(sizes) and (ranks == expected).all() else None
