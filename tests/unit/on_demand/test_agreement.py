"""All ranks save at the same points, however their threads are delayed; here ranks are threads of one process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from xhf_hooks.errors import RankLostError
from xhf_hooks.on_demand import agreement
from xhf_hooks.on_demand.agreement import SaveAgreement

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

WORLD = 3
END = 10**9


class DelayedStore:
    """Random delays before and after each access, so that threads overtake one another."""

    def __init__(self, store: dist.Store, seed: int) -> None:
        self._store, self._random = store, random.Random(seed)

    def _delayed(self, name: str, *args):
        time.sleep(self._random.choice([0, 0, 0, 0.001, 0.004]))
        found = getattr(self._store, name)(*args)
        time.sleep(self._random.choice([0, 0, 0, 0.001, 0.004]))
        return found

    def add(self, *args):
        return self._delayed('add', *args)

    def set(self, *args):
        return self._delayed('set', *args)

    def get(self, *args):
        return self._delayed('get', *args)

    def compare_set(self, *args):
        return self._delayed('compare_set', *args)


class Rank:
    """Training of one rank: it passes points until the run is to end, and remembers where a save was due."""

    def __init__(self, rank: int, store: dist.Store, seed: int, lost: list[Exception]) -> None:
        self.asks = False
        self.saved: list[int] = []
        self._random = random.Random(seed * 100 + rank)
        delayed = DelayedStore(store, seed * 10 + rank)
        self.agreement = SaveAgreement(delayed, rank, WORLD, lambda: self.asks, lost.append, poll_secs=0.002)

    def train(self, n_points: int, keep_pace: Callable[[], object], ask_at: dict[int, float]) -> None:
        for point in range(1, n_points + 1):
            if point in ask_at:
                threading.Timer(ask_at[point], self._ask).start()
            self._pass(point)
            time.sleep(self._random.choice([0, 0, 0.001, 0.003]))
            keep_pace()
        self._pass(END)
        self.agreement.close()

    def _ask(self) -> None:
        self.asks = True

    def _pass(self, point: int) -> None:
        if self.agreement.is_due(point):
            self.asks = False
            self.saved.append(point)


def run_ranks_as_threads(seed: int, n_points: int, n_asks: int, *, lockstep: bool) -> list[Rank]:
    store, lost, chosen = dist.HashStore(), [], random.Random(seed)
    ranks = [Rank(rank, store, seed, lost) for rank in range(WORLD)]
    barrier = threading.Barrier(WORLD)
    asks: list[dict[int, float]] = [{} for _ in ranks]
    for _ in range(n_asks):
        chosen.choice(asks)[chosen.randint(1, n_points - 1)] = chosen.random() * 0.01
    keep_pace = barrier.wait if lockstep else lambda: None
    threads = [
        threading.Thread(target=rank.train, args=(n_points, keep_pace, asks[index])) for index, rank in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), 'a rank waits for ever'
    assert lost == []
    return ranks


@pytest.mark.parametrize('lockstep', [True, False])
def test_all_ranks_save_at_the_same_points(lockstep):
    """Whether training keeps them together or not."""
    saves = 0
    for seed in range(8):
        ranks = run_ranks_as_threads(seed, n_points=300, n_asks=12, lockstep=lockstep)
        assert ranks[0].saved == ranks[1].saved == ranks[2].saved
        saves += len(ranks[0].saved)
    assert saves > 20, 'hardly anything was agreed on, so hardly anything was tested'


def test_the_save_is_not_before_the_request():
    rank = Rank(0, dist.HashStore(), 0, [])
    rank.agreement.close()
    agreed = SaveAgreement(dist.HashStore(), 0, 1, lambda: True, lambda error: None, poll_secs=0.001)
    due = []
    for point in range(1, 2000):
        due += [point] if agreed.is_due(point) else []
        assert not agreed.is_due(point), 'a point counts once'
        time.sleep(0.001)
        if len(due) > 3:
            break
    agreed.close()
    assert len(due) > 3 and due == sorted(set(due))


def test_a_rank_that_does_not_answer_holds_up_nobody():
    """Rank 1 of two is not there."""
    store, lost = dist.HashStore(), []
    alone = SaveAgreement(store, 0, 2, lambda: True, lost.append, poll_secs=0.001)
    while not store.add('0/here', 0):
        time.sleep(0.001)
    assert [alone.is_due(point) for point in range(1, 100)] == [False] * 99
    alone.close()
    assert lost == [] and store.add('0/target', 0) == -1, 'those that come later must not close their gates for it'


def test_a_rank_that_dies_behind_its_gate_is_given_up(monkeypatch):
    monkeypatch.setattr(agreement, '_HELD_SECS', 0.05)
    store, lost = dist.HashStore(), []
    store.add('0/here', 1)  # and never more
    alone = SaveAgreement(store, 0, 2, lambda: True, lost.append, poll_secs=0.001)
    while not store.add('0/target', 0):
        time.sleep(0.001)
    assert not alone.is_due(1)
    alone.close()
    assert lost == []


def test_a_store_that_goes_away_at_the_wrong_instant_is_an_error():
    """Others may have begun to save, and would wait for this rank."""

    class Breaking(DelayedStore):
        def set(self, *args):
            raise RuntimeError('connection reset')

    lost: list[Exception] = []
    alone = SaveAgreement(Breaking(dist.HashStore(), 0), 0, 1, lambda: True, lost.append, poll_secs=0.001)
    while not lost:
        time.sleep(0.001)
    with pytest.raises(RankLostError, match='connection reset'):
        alone.is_due(1)
    alone.close()
    assert len(lost) == 1
