"""From partitions to bytes: walks the plan in order, one bucket at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping

import torch

from xhf_hooks.distributed.collective import Collective
from xhf_hooks.errors import TensorError
from xhf_hooks.format.dtypes import TORCH_DTYPES, ToHost, cast
from xhf_hooks.planning.types import Chunk, Group, SavePlan
from xhf_hooks.sources.base import Source
from xhf_hooks.telemetry.memory import MemoryMeter, return_freed_memory

#: Ranks agree once in so many buckets; a rank that has failed gathers on, for the others, until then.
BUCKETS_PER_AGREEMENT = 64
#: Freed memory is kept for the next bucket up to so many buckets, which is faster, then handed back.
_SPARE_BUCKETS = 3


def gather(
    plan: SavePlan,
    source: Source,
    collective: Collective,
    *,
    use_fp32_master: bool,
    meter: MemoryMeter,
    to_host: ToHost,
) -> Generator[Chunk, None, None]:
    """Gather bucket after bucket and yield the chunks that this rank writes.

    Runs on: all ranks, in step. Before each bucket they wait for each other, on gloo: a writer may hold as many
    bytes as a bucket has and wait for its disk with the next, and what waits for that writer must not be the
    collective that gathers. A failure is remembered, by this and by the caller, and agreed once in a while.

    Args:
        to_host: Gives the bytes of a tensor that this rank writes.

    Raises:
        AgreedError: Some rank failed; or one has a tensor that is not what the plan says.
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
            with source.gathered(bucket.read_names, wanted=wanted, use_fp32_master=use_fp32_master) as tensors:
                for group in ours:
                    yield from group_chunks(group, tensors, rank, to_host, meter)
                meter.sample()
        except Exception as error:
            collective.remember('gather', error)
        if meter.sample() > _SPARE_BUCKETS * plan.largest_bucket_nbytes:
            return_freed_memory()
    if plan.buckets:
        collective.agree('gather')


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
    """What is made of a group's tensors, cast, as far as ``rank`` writes it.

    Raises:
        TensorError: A tensor is not what the plan says.
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
            meter.sample()  # nowhere is there more: what was read, what was made of it, and that cast
        if tuple(tensor.shape) != placement.shape:
            raise TensorError(f'{placement.hf_name}: expected {placement.shape}, made {tuple(tensor.shape)}')
        yield Chunk(placement, to_host(tensor, placement.offset, False), overflows=overflows)
