"""Reads a model in the order of the plan: this rank's slices of tensors, and tensors gathered bucket by bucket.

A ZeRO partition consists of consecutive elements of a row-major tensor, so in the output file it consists of
consecutive bytes, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import TypeVar

import torch

from xhf_hooks.collective import Collective, rank_and_world_size
from xhf_hooks.errors import TensorError
from xhf_hooks.format.dtypes import TORCH_DTYPES, host_bytes
from xhf_hooks.planning.rounds import Portion, portions_of
from xhf_hooks.planning.types import Bucket, Chunk, Group, Placement, SavePlan
from xhf_hooks.sources.base import LocalShard, Source
from xhf_hooks.sources.host_memory import MemoryMeter, return_freed_memory

T = TypeVar('T')
#: A slice that must be cast, or copied from a device, passes through host memory in parts of this many elements.
_PART_NUMEL = 4 * 2**20
#: Ranks agree once per this many buckets. Until then a rank that has failed keeps gathering for the others.
BUCKETS_PER_AGREEMENT = 64
#: Freed memory is kept for reuse, which is faster, and returned to the system once per this many buckets.
_SPARE_BUCKETS = 3


@dataclass(frozen=True)
class Slice:
    """Consecutive elements of an output tensor, cast, on the model's device; they may alias live memory.

    Attributes:
        start: Offset of the first byte in the placement.
    """

    placement: Placement
    start: int
    elements: torch.Tensor

    def chunk(self) -> Chunk:
        """Its bytes in host memory, for a writer."""
        return Chunk(self.placement, host_bytes(self.elements), self.start)


def unsent(
    plan: SavePlan, source: Source, collective: Collective, convert: Callable[[Slice], T]
) -> Generator[T, None, None]:
    """Yield what this rank writes, except what is sent, after ``convert``. Runs on: all ranks, to the end.

    Failures here are remembered, and so must be those of the caller.

    Raises:
        AgreedError: A rank failed.
    """
    with torch.no_grad():
        with collective.remembering('read'):
            own = SliceReader(source).read(_portions_from_a_place_of_its_own(plan))
            yield from map(convert, takewhile(lambda _: not collective.is_failing, own))
        if plan.buckets:
            yield from gathered(plan, source, collective, convert)


def _portions_from_a_place_of_its_own(plan: SavePlan) -> Iterator[Portion]:
    """What ranks write in slices, rotated so that each rank begins with a different group.

    Most file systems let one process at a time write to a file; ranks that write to different files need not wait.
    """
    rank, world_size = rank_and_world_size()
    first = len(plan.sliced) * rank // world_size
    return chain.from_iterable(map(portions_of, plan.sliced[first:] + plan.sliced[:first]))


class SliceReader:
    """Reads this rank's slices. Used by: one thread."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._rank = rank_and_world_size()[0]
        self._last: tuple[str, LocalShard] | None = None  # many outputs may come from one tensor

    def read(self, portions: Iterable[Portion]) -> Generator[Slice, None, None]:
        """This rank's slices of the portions, cast, in parts, without communication.

        Raises:
            TensorError: A slice does not match the plan.
        """
        for portion in portions:
            mine, place = portion.held_by(self._rank), portion.placement
            own = self._shard(portion) if mine else None
            for start in mine[::_PART_NUMEL]:
                first = place.run.start + start - own.start
                part = own.elements[first : first + min(_PART_NUMEL, mine.stop - start)]
                yield Slice(place, start * portion.width, part.to(TORCH_DTYPES[place.dtype]))

    def _shard(self, portion: Portion) -> LocalShard:
        spec, held, first = portion.read, portion.spread.held_by(self._rank), portion.placement.run.start
        if self._last is None or self._last[0] != spec.name:
            self._last = spec.name, self._source.local_shard(spec.name, spec.from_master)
        own = self._last[1]
        start, end = held.start + first, held.stop + first
        found, dtype = range(own.start, own.start + own.elements.numel()), own.elements.dtype
        if start < found.start or end > found.stop or own.elements.dim() != 1 or dtype != TORCH_DTYPES[spec.dtype]:
            raise TensorError(
                f'{spec.name}: {portion.placement.hf_name} needs elements {start} to {end} in {spec.dtype} from rank '
                f"{self._rank}, which has {found.start} to {found.stop} in {dtype}. Set writer='gather', which needs "
                f'no slices'
            )
        return own


def gathered(
    plan: SavePlan, source: Source, collective: Collective, convert: Callable[[Slice], T]
) -> Generator[T, None, None]:
    """Gather bucket after bucket and yield what this rank writes, after ``convert``. Runs on: all ranks, to the end.

    What ``convert`` gets is valid until the next one. Ranks wait for each other on gloo before each bucket: a writer
    may hold a bucket while its disk is busy, and the other ranks must not wait for it inside the collective that
    gathers; for the same reason a rank finds out that it lacks memory before the first of them. Failures here and in
    the caller are remembered, and agreed on every few buckets.

    Raises:
        AgreedError: A rank failed, or found a tensor that does not match the plan.
    """
    with collective.stage('gather'):
        meter = MemoryMeter()
        if collective.world_size > 1:
            source.require_room(plan.largest_bucket_nbytes)
        requests = [_Request.of(bucket, collective.rank) for bucket in plan.buckets]
    with source.opened():
        for number, request in enumerate(requests):
            if number % BUCKETS_PER_AGREEMENT or number == 0:  # before the first, ranks have just agreed
                collective.wait('gather')
            else:
                collective.agree('gather')
            tensors: dict[str, torch.Tensor] = {}
            wanted = () if collective.is_failing else request.wanted
            for is_master, names in request.names.items():
                with collective.remembering('gather'):
                    tensors |= source.gathered(names, wanted=wanted, use_fp32_master=is_master)
            with collective.remembering('gather'):
                for group in () if collective.is_failing else request.groups:
                    yield from map(convert, made_from(group, tensors, collective.rank))
                del tensors
                if meter.sample() > _SPARE_BUCKETS * plan.largest_bucket_nbytes:
                    return_freed_memory()
        collective.agree('gather')


@dataclass(frozen=True)
class _Request:
    """What is gathered at once.

    Attributes:
        names: Of the tensors that are gathered as they are (False), and of those of which the fp32 master is (True).
        groups: What this rank makes of them.
        wanted: The names that it needs for that.
    """

    names: dict[bool, list[str]]
    groups: list[Group]
    wanted: set[str]

    @classmethod
    def of(cls, bucket: Bucket, rank: int) -> _Request:
        """A bucket as ``rank`` gathers it."""
        names: dict[bool, list[str]] = {}
        for spec in sorted(
            (spec for group in bucket.groups for spec in group.reads), key=lambda spec: spec.from_master
        ):
            names.setdefault(spec.from_master, []).append(spec.name)
        groups = [group for group in bucket.groups if any(place.owner == rank for place in group.placements)]
        return cls(names, groups, {spec.name for group in groups for spec in group.reads})


def made_from(group: Group, tensors: Mapping[str, torch.Tensor], rank: int) -> Iterator[Slice]:
    """The outputs of a group that ``rank`` writes, whole and cast.

    Raises:
        TensorError: A tensor does not match the plan.
    """
    for spec in group.reads:
        found = tensors[spec.name]
        if tuple(found.shape) != spec.shape or found.dtype != TORCH_DTYPES[spec.dtype]:
            raise TensorError(f'{spec.name}: expected {spec.dtype} {spec.shape}, {found.dtype} {tuple(found.shape)}')
    if group.combine is None:
        outputs: Mapping[str, torch.Tensor] = {group.placements[0].hf_name: tensors[group.reads[0].name]}
    else:
        # On the host, as in conversions: a GPU sums in another order, or with TF32, and has other work for its memory
        outputs = group.combine({spec.name: tensors[spec.name].cpu() for spec in group.reads})
    for placement in group.placements:
        if placement.owner != rank:
            continue
        made = outputs[placement.hf_name]
        if tuple(made.shape) != placement.shape:
            raise TensorError(f'{placement.hf_name}: expected shape {placement.shape}, made {tuple(made.shape)}')
        yield Slice(placement, 0, made.to(TORCH_DTYPES[placement.dtype]))
