"""Reads a model in the order of the plan: this rank's slices of tensors, and tensors gathered bucket by bucket.

A ZeRO partition consists of consecutive elements of a row-major tensor, so in the output file it consists of
consecutive bytes, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import chain, starmap, takewhile
from typing import Protocol

import torch

from xhf_hooks.compat.torch import rank_and_world_size
from xhf_hooks.errors import TensorError
from xhf_hooks.format.dtypes import TORCH_DTYPES, host_bytes
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.rounds import Portion, portions_of
from xhf_hooks.planning.types import Chunk, Group, Placement, TensorSpec
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.sources.base import LocalElements, Source
from xhf_hooks.sources.checks import read_local_elements, require_elements, require_gathered
from xhf_hooks.sources.host_memory import MemoryMeter, return_freed_memory

#: A slice that must be cast, or copied from a device, passes through host memory in parts of this many elements.
_PART_NUMEL = 4 * 2**20
#: Ranks vote once per this many buckets. Until then a rank that has failed keeps gathering for the other ranks.
BUCKETS_PER_VOTE = 64
#: Freed memory is kept for reuse, which is faster, and returned to the system once per this many buckets.
_SPARE_BUCKETS = 3


class ToHost(Protocol):
    """Brings consecutive elements of an output tensor to host memory.

    The elements are cast, lie on the model's device, and may alias live memory; ``start`` is the offset of their first
    byte in the placement.
    """

    def __call__(self, placement: Placement, elements: torch.Tensor, start: int = 0) -> Chunk: ...


def in_host_memory(placement: Placement, elements: torch.Tensor, start: int = 0) -> Chunk:
    """:class:`ToHost` for what is written at once: elements that are in host memory are not copied."""
    return Chunk(placement, host_bytes(elements), start)


def in_place_and_gathered(
    plan: SavePlan, source: Source, collective: Collective, to_host: ToHost
) -> Generator[Chunk, None, None]:
    """Yield what this rank writes that is in no round: its slices in place, then what ranks gather, by the bucket.

    Runs on: all ranks, to the end.

    Failures here are remembered, and so must be those of the caller.

    Raises:
        AgreedError: A rank failed.
    """
    with torch.no_grad():
        with collective.remembering('read'):
            own = SliceReader(source).read(_portions_from_another_group_each(plan, collective), to_host)
            yield from takewhile(lambda _: not collective.has_remembered_error, own)
        if plan.buckets:
            yield from gathered(plan, source, collective, to_host)


def _portions_from_another_group_each(plan: SavePlan, collective: Collective) -> Iterator[Portion]:
    """The portions of ``writer='positional'``, rotated so that each rank begins with a different group.

    Most file systems let one process at a time write to a file; ranks that write to different files need not wait.
    """
    first = len(plan.in_place) * collective.rank // collective.world_size
    return chain.from_iterable(map(portions_of, plan.in_place[first:] + plan.in_place[:first]))


class SliceReader:
    """Reads this rank's slices. Used by: one thread."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._rank = rank_and_world_size()[0]
        self._last: tuple[str, LocalElements] | None = None  # many outputs may come from one tensor

    def read(self, portions: Iterable[Portion], to_host: ToHost) -> Iterator[Chunk]:
        """This rank's slices of the portions, in parts, without communication.

        Raises:
            TensorError: A slice does not match the plan.
        """
        for portion in portions:
            mine, placement = portion.held_by(self._rank), portion.placement
            if not mine:
                continue
            first = placement.source_range.start
            own = self._local_elements(portion, range(first + mine.start, first + mine.stop))
            for start in mine[::_PART_NUMEL]:
                begin = first + start - own.start
                part = own.elements[begin : begin + min(_PART_NUMEL, mine.stop - start)]
                yield to_host(placement, part.to(TORCH_DTYPES[placement.dtype]), start * portion.width)

    def _local_elements(self, portion: Portion, needed: range) -> LocalElements:
        """What this rank holds of the portion's source tensor.

        Raises:
            TensorError: The elements ``needed`` of the source tensor are not among them.
        """
        spec = portion.read
        if self._last is None or self._last[0] != spec.name:
            self._last = spec.name, read_local_elements(self._source, spec)
        own = self._last[1]
        require_elements(spec, own, needed, self._rank, portion.placement.hf_name)
        return own


def gathered(plan: SavePlan, source: Source, collective: Collective, to_host: ToHost) -> Generator[Chunk, None, None]:
    """Gather bucket after bucket and yield what this rank writes. Runs on: all ranks, to the end.

    Ranks wait for each other on gloo before each bucket: a writer may hold a bucket while its disk is busy, and the
    other ranks must not wait for it inside the collective that gathers; for the same reason a rank finds out that it
    lacks memory before the first of them. Failures here and in the caller are remembered, and reported in a vote every
    few buckets.

    Raises:
        AgreedError: A rank failed, or found a tensor that does not match the plan.
    """
    with collective.stage('gather'):
        meter = MemoryMeter()
        if collective.world_size > 1:
            source.require_device_memory(plan.largest_bucket_nbytes)
        reads = [_reads_of(bucket) for bucket in plan.buckets]
        to_make = [[group for group in bucket if collective.rank in group.owners] for bucket in plan.buckets]
        wanted = [{spec.name for spec in _reads_of(groups)} for groups in to_make]
    with source.opened():
        for number, specs in enumerate(reads):
            if number % BUCKETS_PER_VOTE or number == 0:  # before the first, ranks have just voted
                collective.wait('gather')
            else:
                collective.raise_if_any_failed('gather')
            tensors: dict[str, torch.Tensor] = {}
            with collective.remembering('gather'):
                needed = () if collective.has_remembered_error else wanted[number]
                tensors = source.gathered(specs, wanted=needed)
                require_gathered(source, specs, needed, tensors)
            with collective.remembering('gather'):
                for group in () if collective.has_remembered_error else to_make[number]:
                    yield from starmap(to_host, made_from(group, tensors, collective.rank))
                del tensors
                if meter.sample() > _SPARE_BUCKETS * plan.largest_bucket_nbytes:
                    return_freed_memory()
        collective.raise_if_any_failed('gather')


def _reads_of(groups: Iterable[Group]) -> list[TensorSpec]:
    """The tensors that groups read, each once."""
    return list(dict.fromkeys(spec for group in groups for spec in group.reads))


def made_from(group: Group, tensors: Mapping[str, torch.Tensor], rank: int) -> Iterator[tuple[Placement, torch.Tensor]]:
    """The outputs of a group that ``rank`` writes, whole and cast.

    Args:
        tensors: What the group reads, by name: as the specs say (:func:`.require_gathered`).

    Raises:
        TensorError: An output has not the planned shape.
    """
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
        yield placement, made.to(TORCH_DTYPES[placement.dtype])
