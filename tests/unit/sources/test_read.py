"""What each rank writes of its own, and where it begins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import ExportEntry, Spread, TensorSpec
from xhf_hooks.sources import read as module
from xhf_hooks.sources.base import LocalShard

NUMEL = 1000


@pytest.mark.parametrize('world_size', [1, 2, 3, 8, 20])
def test_ranks_begin_in_different_files_and_together_write_everything(monkeypatch, world_size):
    specs = [TensorSpec(f'{number}.weight', (NUMEL,), 'BF16') for number in range(8)]
    entries = [ExportEntry(spec.name, spec.shape, spec.dtype, (spec.name,), source_offset=0) for spec in specs]
    names = {spec.name for spec in specs}
    spread = dict.fromkeys(names, Spread(NUMEL, -(-NUMEL // world_size)))
    plan = make_plan(entries, specs, max_shard_nbytes=4 * NUMEL, bucket_nbytes=10**6, in_place=True, spread=spread)
    assert len(plan.files) == 4
    begun, seen = [], {}
    for rank in range(world_size):
        monkeypatch.setattr(module, 'rank_and_world_size', lambda rank=rank: (rank, world_size))
        chunks = list(
            module.SliceReader(SimpleNamespace(local_shard=shard_of(rank, world_size))).read(
                module._portions_from_a_place_of_its_own(plan)
            )
        )
        begun.append(chunks[0].placement.file)
        for chunk in chunks:
            seen.setdefault(chunk.placement.hf_name, []).append((chunk.start, chunk.elements.nbytes))
    assert len(set(begun)) == min(world_size, len(plan.files))
    assert seen.keys() == names
    for found in seen.values():
        place = 0
        for start, nbytes in sorted(found):
            assert start == place
            place += nbytes
        assert place == 2 * NUMEL


def shard_of(rank, world_size):
    """As ZeRO-3 has them."""
    share = -(-NUMEL // world_size)

    def local_shard(name, use_fp32_master):
        start = min(rank * share, NUMEL)
        return LocalShard(start, torch.zeros(min(share, NUMEL - start), dtype=torch.bfloat16))

    return local_shard
