"""Two numbers for each tensor tell who has which fragment of its fp32 master, however the flat buffer is cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from xhf_hooks.sources.master_fragments import spread_of_fragments


class Ranks:
    """All ranks, one after the other: from the second round on, each result is that of all."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.rank = world_size, 0
        self.brought: dict[str, Any] = {}

    def all_reduce(self, values: Any, operation: str, stage: str) -> Any:
        merge = {'MIN': np.minimum, 'MAX': np.maximum}[operation]
        self.brought[operation] = merge(values, self.brought.get(operation, values))
        return self.brought[operation]


def fragments(sizes: list[int], world_size: int) -> list[list[range]]:
    """Of each rank, of each tensor: as DeepSpeed links them (utils/mixed_precision_linkage.py)."""
    each = -(-sum(sizes) // world_size) or 1
    found = []
    for rank in range(world_size):
        before, own = 0, []
        for numel in sizes:
            start, end = (min(max(at - before, 0), numel) for at in (rank * each, (rank + 1) * each))
            own.append(range(start, end))
            before += numel
        found.append(own)
    return found


def parameter(numel: int, held: range) -> Any:
    address = SimpleNamespace(start=held.start, numel=len(held))
    mapping = SimpleNamespace(lp_fragment_address=address) if held else None
    return SimpleNamespace(_hp_mapping=mapping, numel=lambda: numel)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 9))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_all_fragments_follow(sizes, world_size):
    of_rank = fragments(sizes, world_size)
    tensors = [{f'w{i}': parameter(n, own[i]) for i, n in enumerate(sizes)} for own in of_rank]
    ranks = Ranks(world_size)
    for ranks.rank in range(world_size):
        spread_of_fragments(tensors[ranks.rank], ranks)
    ranks.rank = 0
    spreads = spread_of_fragments(tensors[0], ranks)
    for rank, own in enumerate(of_rank):
        for i, held in enumerate(own):
            assert spreads[f'w{i}'].held_by(rank) == held, (rank, i)
