"""Reads this rank's own slice of each tensor; nothing is gathered.

A ZeRO partition consists of consecutive elements of a row-major tensor, so in the output file it consists of
consecutive bytes, whatever the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from xhf_hooks.collective import rank_and_world_size
from xhf_hooks.errors import TensorError
from xhf_hooks.format.dtypes import TORCH_DTYPES, ToHost, cast
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.host_memory import MemoryMeter
from xhf_hooks.planning.types import Chunk, Group, Placement, Portion, SavePlan, TensorSpec
from xhf_hooks.sources.base import LocalShard, Source

#: A slice that must be cast, or copied from a device, passes through host memory in parts of this many elements.
_PART_NUMEL = 4 * 2**20


@dataclass(frozen=True)
class Slice:
    """Consecutive elements of an output tensor, cast, on the model's device; they may alias live memory.

    Attributes:
        start: Offset of the first byte in the placement.
        overflows: Number of finite elements that the cast made infinite.
    """

    placement: Placement
    start: int
    elements: torch.Tensor
    overflows: int

    def held_in(self, hold: ToHost) -> Slice:
        """A copy whose bytes are in the memory that ``hold`` returns."""
        copy = torch.frombuffer(hold(self.elements, self._offset), dtype=torch.uint8)
        return replace(self, elements=copy)

    def chunk(self, to_host: ToHost) -> Chunk:
        """Its bytes in host memory, for a writer."""
        return Chunk(self.placement, to_host(self.elements, self._offset), self.start, self.overflows)

    @property
    def _offset(self) -> int:
        """Offset of its first byte in the file."""
        return self.placement.offset + self.start


def local_shards(
    plan: SavePlan,
    source: Source,
    *,
    meter: MemoryMeter,
    to_host: ToHost,
) -> Generator[Chunk, None, None]:
    """Yield the bytes of the slices that this rank writes. Runs on: all ranks, each at its own pace.

    Raises:
        TensorError: A slice does not match the plan.
    """
    reader = SliceReader(source)
    for group in _from_a_place_of_its_own(plan.sliced):
        for found in reader.read(group.portions):
            yield found.chunk(to_host)
        meter.sample()


def _from_a_place_of_its_own(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The groups, rotated so that each rank begins with a different one.

    Most file systems let one process at a time write to a file; ranks that write to different files need not wait.
    """
    rank, world_size = rank_and_world_size()
    first = len(groups) * rank // world_size
    return groups[first:] + groups[:first]


class SliceReader:
    """Reads this rank's slices, in the order of the plan. Used by: one thread."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._rank = rank_and_world_size()[0]
        self._last: tuple[str, LocalShard] | None = None  # many outputs may come from one tensor

    def read(self, portions: Iterable[Portion]) -> Iterator[Slice]:
        """This rank's slices of the portions, without communication. Portions that it has no part of are skipped.

        Raises:
            TensorError: A slice does not match the plan.
        """
        for portion in portions:
            mine = portion.held_by(self._rank)
            if mine:
                yield from _in_parts(portion.placement, mine, self._shard(portion))

    def _shard(self, portion: Portion) -> LocalShard:
        name, first = portion.read.name, portion.placement.run.start
        if self._last is None or self._last[0] != name:
            own = self._source.local_shard(name, portion.read.from_master)
            _check(portion.read, own)
            self._last = name, own
        own = self._last[1]
        expected, found = portion.spread.held_by(self._rank), range(own.start, own.start + own.elements.numel())
        if expected.start + first < found.start or expected.stop + first > found.stop:
            raise TensorError(
                f'{name}: {portion.placement.hf_name} needs elements {expected.start + first} to '
                f'{expected.stop + first} from rank {self._rank}, which has {found.start} to {found.stop}. Set '
                f"writer='gather', which needs no slices"
            )
        return own


def _in_parts(placement: Placement, mine: range, own: LocalShard) -> Iterator[Slice]:
    """The elements ``mine`` of a placement, cast, in parts."""
    width = DTYPE_NBYTES[placement.dtype]
    before = placement.run.start - own.start
    for start in mine[::_PART_NUMEL]:
        stop = min(start + _PART_NUMEL, mine.stop)
        source = own.elements[before + start : before + stop]
        part, overflows = cast(source, placement.dtype)
        yield Slice(placement, start * width, part, overflows)


def _check(spec: TensorSpec, own: LocalShard) -> None:
    numel, end = math.prod(spec.shape), own.start + own.elements.numel()
    if own.elements.dim() != 1 or not 0 <= own.start <= end <= numel or own.elements.dtype != TORCH_DTYPES[spec.dtype]:
        raise TensorError(
            f'{spec.name}: expected consecutive elements of {numel} in {spec.dtype}, found '
            f'{own.elements.dtype} {tuple(own.elements.shape)} from element {own.start} on'
        )
