"""From partitions to bytes without a gather: every rank reads its own slice of each tensor.

A ZeRO partition is a run of consecutive elements of a row-major tensor, so it is one run of bytes in the
output file, whatever the dtype there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

import torch

from xhf_hooks.distributed.collective import rank_and_world_size
from xhf_hooks.errors import TensorError
from xhf_hooks.format.dtypes import TORCH_DTYPES, cast
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.planning.types import Chunk, Group, SavePlan
from xhf_hooks.sources.base import LocalShard, Source
from xhf_hooks.telemetry.memory import MemoryMeter

#: A slice that must be cast or copied from a device goes through host memory in parts of so many elements.
_PART_NUMEL = 4 * 2**20


def local_shards(
    plan: SavePlan,
    source: Source,
    *,
    use_fp32_master: bool,
    meter: MemoryMeter,
    to_host: Callable[[torch.Tensor], memoryview],
) -> Generator[Chunk, None, None]:
    """Yield the bytes of this rank's slices. Runs on: all ranks, each at its own pace.

    Raises:
        TensorError: A slice is not what the plan says.
    """
    for group in _from_a_place_of_its_own(plan.sliced):
        own = source.local_shard(group.reads[0].name, use_fp32_master)
        _check(group, own)
        for placement in group.placements:
            width, end = DTYPE_NBYTES[placement.dtype], placement.source_offset + math.prod(placement.shape)
            mine = range(max(own.start, placement.source_offset), min(own.start + own.elements.numel(), end))
            for start in mine[::_PART_NUMEL]:
                stop = min(start + _PART_NUMEL, mine.stop)
                part, overflows = cast(own.elements[start - own.start : stop - own.start], placement.dtype)
                yield Chunk(placement, to_host(part), (start - placement.source_offset) * width, overflows)
        meter.sample()


def _from_a_place_of_its_own(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """All of them, from another one on for each rank: ranks in different files do not wait for each other's writes.

    A file system lets one process at a time write to a file.
    """
    rank, world_size = rank_and_world_size()
    first = len(groups) * rank // world_size
    return groups[first:] + groups[:first]


def _check(group: Group, own: LocalShard) -> None:
    spec = group.reads[0]
    numel, end = math.prod(spec.shape), own.start + own.elements.numel()
    if own.elements.dim() != 1 or not 0 <= own.start <= end <= numel or own.elements.dtype != TORCH_DTYPES[spec.dtype]:
        raise TensorError(
            f'{spec.name}: expected consecutive {spec.dtype} of its {numel} elements, found '
            f'{own.elements.dtype} {tuple(own.elements.shape)} from {own.start} on'
        )
