"""Who sends what to whom: every byte once, as much at once as was said, and both sides of a message agree."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xhf_hooks.planning.planner import describe_plan, make_plan
from xhf_hooks.planning.types import ExportEntry, Portion, SavePlan, Spread, TensorSpec

WORLD_SIZE = 4
SPREADS = st.builds(Spread, st.integers(0, 200), st.integers(1, 80), st.integers(0, 300))


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


@given(SPREADS)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_each_element_is_held_once_in_the_order_of_ranks(spread):
    ranks = range(0 if not spread.numel else spread.holders.stop + 2)
    held = [i for rank in ranks for i in spread.held_by(rank)]
    assert held == list(range(spread.numel))
    assert [rank for rank in ranks if spread.held_by(rank)] == list(spread.holders)


@given(SPREADS, st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_run_of_elements_is_held_by_those_that_hold_them(spread, data):
    start = data.draw(st.integers(0, spread.numel))
    numel = data.draw(st.integers(0, spread.numel - start))
    run = spread.within(range(start, start + numel))
    for rank in spread.holders:
        own = spread.held_by(rank)
        assert [i + start for i in run.held_by(rank)] == [i for i in own if start <= i < start + numel]


@given(SPREADS, st.integers(1, 9))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_parts_of_a_slice_are_the_slice(spread, count):
    plan = plan_of({'w': 1}, round_nbytes=1)
    portion = plan.rounds[0].portions[0]
    parts = [Portion(portion.read, portion.placement, spread, number, count) for number in range(count)]
    for rank in spread.holders:
        assert [i for part in parts for i in part.held_by(rank)] == list(spread.held_by(rank))


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


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    n_writers=st.integers(1, 9),
    shard_nbytes=st.integers(1, 2000),
    made_together=st.integers(1, 4),
    are_sent=st.booleans(),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_each_file_has_one_owner_and_owners_as_many_bytes(sizes, n_writers, shard_nbytes, made_together, are_sent):
    """However few files there are, and where what is made of one read lies in several of them."""
    specs = [TensorSpec(f'w{i}', (numel,), 'U8') for i, numel in enumerate(sizes)]
    combined = dict(reads=('w0',), combine=dict)
    entries = [ExportEntry(f'made {i}', (50,), 'U8', **combined) for i in range(made_together)]
    entries[1:1] = [ExportEntry(spec.name, spec.shape, 'U8', (spec.name,)) for spec in specs]
    plan = make_plan(
        entries,
        specs,
        max_shard_nbytes=shard_nbytes,
        bucket_nbytes=1,
        n_writers=n_writers,
        spread={spec.name: evenly(spec.shape[0]) for spec in specs} if are_sent else {},
        round_nbytes=100,
    )
    owners: dict[str, set[int]] = {}
    loads: dict[int, int] = {}
    for place in plan.placements:
        owners.setdefault(place.file, set()).add(place.owner)
        loads[place.owner] = loads.get(place.owner, 0) + place.nbytes
    assert all(len(found) == 1 for found in owners.values())
    assert len(loads) == min(n_writers, len(plan.files))
    assert max(loads.values()) - min(loads.values()) <= max(file.nbytes for file in plan.files)


def test_owners_of_few_files_are_apart_from_each_other():
    """On hosts of their own, as far as there are any."""
    specs = [TensorSpec(f'w{i}', (100,), 'F32') for i in range(4)]
    entries = [ExportEntry(spec.name, spec.shape, spec.dtype, (spec.name,)) for spec in specs]
    plan = make_plan(entries, specs, max_shard_nbytes=400, bucket_nbytes=1, n_writers=32)
    assert [place.owner for place in plan.placements] == [0, 8, 16, 24]


def test_ranks_that_share_files_share_what_is_gathered():
    specs = [TensorSpec(f'w{i}', (100,), 'F32') for i in range(4)]
    entries = [ExportEntry(spec.name, spec.shape, spec.dtype, (spec.name,)) for spec in specs]
    plan = make_plan(entries, specs, max_shard_nbytes=10**6, bucket_nbytes=1, n_writers=4, in_place=True, spread={})
    assert len(plan.files) == 1
    assert sorted(place.owner for place in plan.placements) == [0, 1, 2, 3]


def test_small_slices_of_very_many_ranks_are_gathered():
    sizes = dict(norm=4096, weight=4096 * 4096)
    for world_size, gathered in ((8, []), (1024, ['norm'])):
        plan = plan_of(sizes, round_nbytes=10**7, world_size=world_size)
        assert [group.reads[0].name for group in plan.gathered] == gathered
        pieces = sum(len(p.spread.holders) for at_once in plan.rounds for p in at_once.portions if p.number == 0)
        assert pieces <= math.ceil(plan.nbytes / 4096) + 16 * len(sizes)


def test_the_digest_covers_who_has_what():
    spec = TensorSpec('w', (100,), 'F32')
    entry = ExportEntry('w', (100,), 'F32', ('w',))
    how = dict(max_shard_nbytes=10**6, bucket_nbytes=10**6, round_nbytes=10**6)
    spreads = (Spread(100, 50), Spread(100, 60), Spread(100, 60, 20))
    plans = [make_plan([entry], [spec], spread={'w': spread}, **how) for spread in spreads]
    assert len({plan.digest for plan in plans}) == 3
    assert len({tuple(describe_plan(plan)) for plan in plans}) == 3
