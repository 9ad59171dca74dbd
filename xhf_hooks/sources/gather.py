"""Gathers tensors bucket by bucket, in the order of the plan."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from xhf_hooks.collective import Collective
from xhf_hooks.errors import TensorError
from xhf_hooks.format.dtypes import TORCH_DTYPES, ToHost, cast
from xhf_hooks.host_memory import MemoryMeter, return_freed_memory
from xhf_hooks.planning.types import Bucket, Chunk, Group, SavePlan
from xhf_hooks.sources.base import Source

#: Ranks agree once per this many buckets. Until then a rank that has failed keeps gathering for the others.
BUCKETS_PER_AGREEMENT = 64
#: Freed memory is kept for reuse, which is faster, and returned to the system once per this many buckets.
_SPARE_BUCKETS = 3


def gather(
    plan: SavePlan,
    source: Source,
    collective: Collective,
    *,
    meter: MemoryMeter,
    to_host: ToHost,
) -> Generator[Chunk, None, None]:
    """Gather bucket after bucket and yield the chunks that this rank writes.

    Runs on: all ranks, in step. They wait for each other on gloo before each bucket: a writer may hold a bucket while
    its disk is busy, and the other ranks must not wait for it inside the collective that gathers. Failures here and in
    the caller are remembered, and agreed on every few buckets.

    Args:
        to_host: Returns the bytes of a tensor that this rank writes.

    Raises:
        AgreedError: A rank failed, or found a tensor that does not match the plan.
    """
    rank = collective.rank
    for number, bucket in enumerate(plan.buckets):
        if number % BUCKETS_PER_AGREEMENT == 0:
            collective.agree('gather')
        else:
            collective.wait('gather')
        ours = [group for group in bucket.groups if any(p.owner == rank for p in group.placements)]
        if collective.is_failing:
            ours = []
        wanted = {spec.name for group in ours for spec in group.reads}
        try:
            with _gathered(source, bucket, wanted) as tensors:
                for group in ours:
                    yield from group_chunks(group, tensors, rank, to_host, meter)
                meter.sample()
        except Exception as error:
            collective.remember('gather', error)
        if meter.sample() > _SPARE_BUCKETS * plan.largest_bucket_nbytes:
            return_freed_memory()
    if plan.buckets:
        collective.agree('gather')


@contextmanager
def _gathered(source: Source, bucket: Bucket, wanted: Collection[str]) -> Iterator[Mapping[str, torch.Tensor]]:
    specs = [spec for group in bucket.groups for spec in group.reads]
    found: dict[str, torch.Tensor] = {}
    with ExitStack() as opened:
        for from_master in (False, True):
            names = [spec.name for spec in specs if spec.from_master is from_master]
            if names:
                some = source.gathered(names, wanted=wanted, use_fp32_master=from_master)
                found.update(opened.enter_context(some))
        yield found


def _check(group: Group, tensors: Mapping[str, torch.Tensor]) -> None:
    for spec in group.reads:
        tensor = tensors[spec.name]
        if tuple(tensor.shape) != spec.shape or tensor.dtype != TORCH_DTYPES[spec.dtype]:
            raise TensorError(
                f'{spec.name}: expected {spec.dtype} {spec.shape}, gathered {tensor.dtype} {tuple(tensor.shape)}'
            )


def group_chunks(
    group: Group,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    to_host: ToHost,
    meter: MemoryMeter,
) -> Iterator[Chunk]:
    """The outputs of a group that ``rank`` writes, cast.

    Raises:
        TensorError: A tensor does not match the plan.
    """
    _check(group, tensors)
    if group.combine is None:
        outputs: Mapping[str, torch.Tensor] = {group.placements[0].hf_name: tensors[group.reads[0].name]}
    else:
        outputs = group.combine({spec.name: tensors[spec.name] for spec in group.reads})
    for placement in group.placements:
        if placement.owner != rank:
            continue
        tensor, overflows = cast(outputs[placement.hf_name], placement.dtype)
        if group.combine is not None:
            meter.sample()  # the peak: what was read, what was made from it, and the cast result
        if tuple(tensor.shape) != placement.shape:
            raise TensorError(f'{placement.hf_name}: expected shape {placement.shape}, made {tuple(tensor.shape)}')
        yield Chunk(placement, to_host(tensor, placement.offset), overflows=overflows)
