"""Who sends what to whom: every byte once, as much at once as was said, and both sides of a message agree."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import ExportEntry, SavePlan, Spread, TensorSpec

WORLD_SIZE = 4


def evenly(numel: int, world_size: int = WORLD_SIZE) -> Spread:
    return Spread(numel, max(1, -(-numel // world_size)))


def plan_of(
    sizes: dict[str, int],
    *,
    round_nbytes: int,
    n_writers: int = 1,
    world_size: int = WORLD_SIZE,
    shard_nbytes: int = 10**12,
    **options: Any,
) -> SavePlan:
    specs = [TensorSpec(name, (numel,), 'BF16') for name, numel in sizes.items()]
    entries = [ExportEntry(spec.name, spec.shape, spec.dtype, (spec.name,)) for spec in specs]
    return make_plan(
        entries,
        specs,
        max_shard_nbytes=shard_nbytes,
        bucket_nbytes=10**6,
        n_writers=n_writers,
        round_nbytes=round_nbytes,
        **{'spread': {name: evenly(numel, world_size) for name, numel in sizes.items()}, **options},
    )


@pytest.mark.parametrize('n_writers', [1, WORLD_SIZE])
@pytest.mark.parametrize('round_nbytes', [10, 64, 1000, 10**6])
def test_both_sides_of_a_message_agree_and_no_owner_gets_more_at_once(n_writers, round_nbytes):
    sizes = dict(a=1, b=0, big=1001, c=40, d=7, e=300)
    plan = plan_of(sizes, round_nbytes=round_nbytes, n_writers=n_writers, shard_nbytes=90)
    assert {place.owner for place in plan.sent} == set(range(n_writers))
    for at_once in plan.rounds:
        for owner in range(WORLD_SIZE):
            incoming = at_once.incoming(owner)
            for sender in range(WORLD_SIZE):
                assert at_once.outgoing(sender).get(owner, 0) == incoming.get(sender, 0)
                listed = sum(portion.nbytes_of(sender) for portion in at_once.message(sender, owner))
                assert sender == owner or listed == incoming.get(sender, 0)
            assert sum(incoming.values()) <= at_once.most_incoming_nbytes(owner)
            # What is cut is cut by slices, each of which is rounded to an element
            own = sum(portion.nbytes_of(owner) for portion in at_once.for_owner(owner))
            assert sum(incoming.values()) + own <= round_nbytes + 2 * WORLD_SIZE


@pytest.mark.parametrize('n_writers', [1, WORLD_SIZE])
def test_an_owner_reads_itself_what_every_rank_has(n_writers):
    """Nothing travels; or, where each is to copy a share, as much as of what is in slices."""
    sizes = {f'w{i}': 4096 for i in range(4)}
    everywhere = {name: replace(evenly(numel), on_every_rank=True) for name, numel in sizes.items()}
    how = dict(round_nbytes=10_000, n_writers=n_writers, shard_nbytes=8192)
    plan, shared = (plan_of(sizes, **how, spread=everywhere, share_copies=share) for share in (False, True))
    assert plan.digest != shared.digest
    for portion in (portion for at_once in plan.rounds for portion in at_once.portions):
        owner = portion.placement.owner
        assert list(portion.spread.holders) == [owner] and portion.nbytes_of(owner) == portion.placement.nbytes
    assert not any(at_once.outgoing(rank) for at_once in plan.rounds for rank in range(WORLD_SIZE))
    assert not any(at_once.most_incoming_nbytes(rank) for at_once in plan.rounds for rank in range(WORLD_SIZE))
    sent = sum(n for at_once in shared.rounds for rank in range(WORLD_SIZE) for n in at_once.outgoing(rank).values())
    assert sent == sum(p.nbytes for p in plan.placements) * (WORLD_SIZE - 1) // WORLD_SIZE


def test_small_slices_of_very_many_ranks_are_gathered():
    sizes = dict(norm=4096, weight=4096 * 4096)
    for world_size, gathered in ((8, []), (1024, ['norm'])):
        plan = plan_of(sizes, round_nbytes=10**7, world_size=world_size)
        assert [group.reads[0].name for group in plan.gathered] == gathered
        pieces = sum(len(p.spread.holders) for at_once in plan.rounds for p in at_once.portions if p.number == 0)
        assert pieces <= math.ceil(plan.nbytes / 4096) + 16 * len(sizes)
