"""Plans for a writer that cannot seek: one owner for each file, which gets its bytes in their order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from xhf_hooks.planning.front_to_back import most_waiting_nbytes
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import ExportEntry, SavePlan, Spread, TensorSpec

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

WORLD_SIZE = 3
SIZES = {'a': 100, 'b': 3, 'c': 1, 'd': 57, 'e': 0, 'f': 40, 'g': 8, 'h': 41}


def evenly(numel: int, on_every_rank: bool = False) -> Spread:
    return Spread(numel, max(1, -(-numel // WORLD_SIZE)), on_every_rank=on_every_rank)


def plan_of(
    *, n_writers: int, combined: tuple[str, ...] = (), shard_nbytes: int = 400, copied: bool = False
) -> SavePlan:
    specs = [TensorSpec(name, (numel,), 'F32') for name, numel in SIZES.items()]
    entries = [
        ExportEntry(s.name, s.shape, 'F32', (s.name,), combine=(lambda read: read) if s.name in combined else None)
        for s in specs
    ]
    return make_plan(
        entries,
        specs,
        max_shard_nbytes=shard_nbytes,
        bucket_nbytes=64,
        n_writers=n_writers,
        spread={spec.name: evenly(spec.shape[0], copied) for spec in specs},
        round_nbytes=50,
        front_to_back=True,
    )


def arrivals(plan: SavePlan, owner: int) -> Iterator[tuple[str, int, int]]:
    """What an owner gets, in its order: file, first byte, number of bytes (sources/send.py, sources/gather.py)."""
    for at_once in plan.rounds:
        for portion in at_once.for_owner(owner):
            for holder in portion.holders:
                held = portion.held_by(holder)
                start = portion.placement.offset + held.start * portion.width
                yield portion.placement.file, start, len(held) * portion.width
    for group in plan.gathered:
        for place in group.placements:
            if place.owner == owner:
                yield place.file, place.offset, place.nbytes


@pytest.mark.parametrize('copied', [False, True])
@pytest.mark.parametrize('combined', [(), ('d',), ('b', 'h')])
@pytest.mark.parametrize('n_writers', [1, 2, 3])
@pytest.mark.parametrize('shard_nbytes', [10_000, 400, 100])
def test_each_file_comes_in_its_order_to_one_rank(n_writers, combined, shard_nbytes, copied):
    plan = plan_of(n_writers=n_writers, combined=combined, shard_nbytes=shard_nbytes, copied=copied)
    if copied:
        assert not any(at_once.outgoing(rank) for at_once in plan.rounds for rank in range(WORLD_SIZE))
    ends = {file.name: len(file.header) for file in plan.files}
    owners: dict[str, set[int]] = {file.name: set() for file in plan.files}
    for owner in range(n_writers):
        for file, start, nbytes in arrivals(plan, owner):
            owners[file].add(owner)
            if nbytes:
                assert start == ends[file]
                ends[file] += nbytes
    assert ends == {file.name: file.nbytes for file in plan.files}
    assert all(len(found) == 1 for found in owners.values())
    assert len(set().union(*owners.values())) == min(n_writers, len(plan.files))
    assert bool(plan.buckets) == bool(combined)


@pytest.mark.parametrize('n_writers', [1, 3])
def test_a_file_is_sent_or_gathered(n_writers):
    plan = plan_of(n_writers=n_writers, combined=('d',), shard_nbytes=200)
    sent = {place.file for place in plan.sent}
    gathered = {place.file for group in plan.gathered for place in group.placements}
    assert sent and gathered and not sent & gathered


def test_both_sides_of_a_message_agree():
    plan = plan_of(n_writers=2)
    for at_once in plan.rounds:
        for owner in at_once.owners:
            incoming = at_once.incoming(owner)
            assert incoming == {
                rank: nbytes for rank in range(WORLD_SIZE) if (nbytes := at_once.outgoing(rank).get(owner))
            }
            assert sum(incoming.values()) <= at_once.most_incoming_nbytes(owner)


def test_owners_are_balanced_by_bytes():
    plan = plan_of(n_writers=3, shard_nbytes=100)
    loads = [sum(p.nbytes for p in plan.placements if p.owner == rank) for rank in range(3)]
    assert max(loads) - min(loads) <= max(place.nbytes for place in plan.placements)


def made_together(*parts: str) -> SavePlan:
    """Outputs of one read that lie apart in one file, with others between them."""
    names = ('a', 'b', 'c', 'd')
    reads = {name: 'fused' if name in parts else name for name in names}
    specs = [TensorSpec('fused', (8,), 'F32'), *(TensorSpec(name, (4,), 'F32') for name in names if name not in parts)]

    def combine(read):
        return read

    entries = [ExportEntry(n, (4,), 'F32', (reads[n],), combine=combine if n in parts else None) for n in names]
    spread = {spec.name: evenly(spec.shape[0]) for spec in specs}
    how = dict(max_shard_nbytes=10_000, bucket_nbytes=1, spread=spread, front_to_back=True)
    return make_plan(entries, specs, **how)


@pytest.mark.parametrize(('parts', 'waiting'), [((), 0), (('a', 'b'), 0), (('a', 'c'), 16), (('a', 'd'), 16)])
def test_what_is_made_before_its_turn_waits(parts, waiting):
    plan = made_together(*parts)
    assert most_waiting_nbytes(plan, 0) == waiting
    assert most_waiting_nbytes(plan, 1) == 0
