"""Who sends what to whom: every byte once, as much at once as was said, and both sides of a message agree."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xhf_hooks.planning.planner import describe_plan, make_plan
from xhf_hooks.planning.types import ExportEntry, Portion, SavePlan, Spread, TensorSpec

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

WORLD_SIZE = 4
SPREADS = st.builds(Spread, st.integers(0, 200), st.integers(1, 80), st.integers(0, 300))


def evenly(numel: int, world_size: int = WORLD_SIZE) -> Spread:
    return Spread(numel, max(1, -(-numel // world_size)))


def plan_of(sizes: dict[str, int], *, round_nbytes: int, n_writers: int = 1, world_size: int = WORLD_SIZE) -> SavePlan:
    specs = [TensorSpec(name, (numel,), 'BF16') for name, numel in sizes.items()]
    entries = [ExportEntry(spec.name, spec.shape, spec.dtype, (spec.name,)) for spec in specs]
    return make_plan(
        entries,
        specs,
        max_shard_nbytes=10**12,
        bucket_nbytes=10**6,
        n_writers=n_writers,
        spread={name: evenly(numel, world_size) for name, numel in sizes.items()},
        round_nbytes=round_nbytes,
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
    run = spread.within(start, numel)
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
    plan = plan_of(dict(a=1, b=0, big=1001, c=40, d=7, e=300), round_nbytes=round_nbytes, n_writers=n_writers)
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
def test_every_byte_travels_once_at_most(n_writers):
    """Of each tensor all but the owner's slice: (world - 1) / world of the model."""
    plan = plan_of({f'w{i}': 4096 for i in range(8)}, round_nbytes=10_000, n_writers=n_writers)
    sent = sum(n for at_once in plan.rounds for rank in range(WORLD_SIZE) for n in at_once.outgoing(rank).values())
    assert sent == sum(p.nbytes for p in plan.placements) * (WORLD_SIZE - 1) // WORLD_SIZE
    assert len({p.owner for p in plan.sent}) == n_writers
    covered = [0] * len(plan.placements)
    for at_once in plan.rounds:
        for portion in at_once.portions:
            for rank in portion.spread.holders:
                covered[plan.placements.index(portion.placement)] += portion.nbytes_of(rank)
    assert covered == [p.nbytes for p in plan.placements]


def test_owners_receive_beside_each_other():
    """Each in as many rounds as it needs, all from the first on."""
    plan = plan_of({f'w{i}': 1000 for i in range(8)}, round_nbytes=2000, n_writers=WORLD_SIZE)
    assert [at_once.owners for at_once in plan.rounds] == [list(range(WORLD_SIZE))] * 2


def test_runs_of_one_read_have_the_owner_of_their_file():
    """Experts out of fused ones, in a file each: each file has one writer."""
    spec = TensorSpec('fused', (4, 100), 'F32')
    shared = dict(dtype='F32', reads=('fused',), combine=dict)
    entries = [ExportEntry(f'e{i}', (100,), source_offset=100 * i, **shared) for i in range(4)]
    how = dict(max_shard_nbytes=400, bucket_nbytes=10**6, n_writers=2, round_nbytes=10**6)
    plan = make_plan(entries, [spec], spread={'fused': evenly(400, 2)}, **how)
    assert [(p.file[6:11], p.owner) for p in plan.sent] == [('00001', 0), ('00003', 0), ('00002', 1), ('00004', 1)]
    of_last = next(p for p in plan.rounds[0].portions if p.placement.hf_name == 'e3')
    assert (len(of_last.held_by(0)), of_last.held_by(1)) == (0, range(100))


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
