"""Ranks meet in a store in which an earlier attempt of the run has left what it wrote."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from xhf_hooks.errors import RankLostError
from xhf_hooks.ranks import rendezvous
from xhf_hooks.ranks.rendezvous import wait_for_all_ranks


def meet_all(store: dist.Store, world_size: int, late_rank: int) -> list[str]:
    """The name of the rendezvous, by rank; one comes late, and none may leave before."""
    is_here = threading.Event()

    def come(rank: int) -> str:
        if rank == late_rank:
            time.sleep(0.3)
            is_here.set()
        name = wait_for_all_ranks(store, rank, world_size, 60.0)
        assert is_here.is_set()
        return name

    with ThreadPoolExecutor(world_size) as pool:
        return [*pool.map(come, range(world_size))]


@pytest.mark.parametrize('late_rank', [0, 2])
def test_what_is_left_of_earlier_attempts_is_not_believed(late_rank):
    store = dist.HashStore()
    first = meet_all(store, 4, late_rank)
    for rank in (0, 1):  # in the next attempt a rank died before the others came
        with pytest.raises(RankLostError):
            wait_for_all_ranks(store, rank, 4, 0.01)
    second, third = meet_all(store, 4, late_rank), meet_all(store, 3, late_rank)  # the last one with fewer ranks
    names = [{*first}, {*second}, {*third}]
    assert [len(found) for found in names] == [1, 1, 1] and len(set.union(*names)) == 3


@pytest.mark.parametrize(('here', 'missing'), [((0, 2), 'ranks 1, 3'), ((1, 2, 3), 'ranks 0')])
def test_the_ranks_that_are_missing_are_named_once(here, missing, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(rendezvous, 'WARN_AFTER_SECS', 0.3)
    store = dist.HashStore()
    errors = []

    def come(rank: int) -> None:
        with pytest.raises(RankLostError) as found:
            wait_for_all_ranks(store, rank, 4, 1.0)
        errors.append(str(found.value))

    with ThreadPoolExecutor(4) as pool:
        [*pool.map(come, here)]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and f' waits for {missing}, which did not reach this save so far' in said[0], said
    assert sum(f'{missing} have not reached this save within 1 s' in error for error in errors) >= 1, errors
