"""When ranks that have raised an exception decide to save, and which exceptions count."""

from __future__ import annotations

import logging
import sys
import threading

import pytest
import torch.distributed as dist

from xhf_hooks.distributed.collective import Collective
from xhf_hooks.errors import XhfError
from xhf_hooks.on_demand.exceptions import Decision, UncaughtExceptions, decide
from xhf_hooks.telemetry.log import RunLog

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

LONG_SECS = 60.0


def decisions(iterations: dict[int, int], world_size: int, wait_secs: float = LONG_SECS) -> dict[int, Decision]:
    """Of the ranks that have raised, by the iterations that they have done."""
    store, found = dist.HashStore(), {}

    def raised(rank: int) -> None:
        found[rank] = decide(store, rank, world_size, iterations[rank], wait_secs)

    threads = [threading.Thread(target=raised, args=(rank,)) for rank in iterations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_have_raised():
    assert decisions({0: 5, 1: 5, 2: 5}, 3) == dict.fromkeys(range(3), Decision.SAVE)


def test_after_different_iterations():
    assert decisions({0: 5, 1: 6, 2: 5}, 3) == dict.fromkeys(range(3), Decision.STEPS_DIFFER)


def test_some_have_not():
    assert decisions({0: 5, 2: 5}, 3, 0.2) == dict.fromkeys([0, 2], Decision.SOME_ARE_MISSING)


def test_who_comes_late_decides_nothing_else():
    store = dist.HashStore()
    assert decide(store, 0, 2, 5, 0.0) is Decision.SOME_ARE_MISSING
    assert decide(store, 1, 2, 5, LONG_SECS) is Decision.SOME_ARE_MISSING


@pytest.fixture
def hooked(monkeypatch):
    """The exceptions that were saved after, and those that Python was to report."""
    saved, reported = [], []
    monkeypatch.setattr(sys, 'excepthook', lambda kind, error, where: reported.append(error))
    before = sys.excepthook
    done = [3]
    log = RunLog(logging.getLogger('xhf_hooks.test'), 'test')

    def save(error: Exception) -> None:
        saved.append(error)
        if isinstance(error, MemoryError):
            raise OSError('no space')

    watching = UncaughtExceptions(Collective(), log, iterations_done=lambda: done[0], save=save)
    yield saved, reported, done, watching, before
    watching.close()


def raised(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


@pytest.mark.parametrize('error', [ValueError('x'), MemoryError(), RuntimeError('CUDA out of memory')], ids=repr)
def test_an_exception_is_saved_after_and_goes_on(hooked, error):
    saved, reported, *_ = hooked
    raised(error)
    assert saved == reported == [error]
    raised(error)  # of another thread of the program's end: once is enough
    assert saved == [error] and reported == [error, error]


@pytest.mark.parametrize('error', [KeyboardInterrupt(), SystemExit(1), XhfError('a save failed')], ids=repr)
def test_others_go_on_alone(hooked, error):
    saved, reported, *_ = hooked
    raised(error)
    assert saved == [] and reported == [error]


def test_before_the_first_iteration_there_is_nothing_to_save(hooked):
    saved, reported, done, *_ = hooked
    done[0] = None
    raised(ValueError('x'))
    assert saved == [] and len(reported) == 1


def test_close_restores_the_hook(hooked):
    *_, watching, before = hooked
    watching.close()
    assert sys.excepthook is before


def test_a_hook_that_came_later_stays(hooked):
    saved, reported, _, watching, _ = hooked
    ours = sys.excepthook
    sys.excepthook = theirs = lambda *raised: ours(*raised)
    watching.close()
    assert sys.excepthook is theirs
    raised(ValueError('x'))
    assert saved == [] and len(reported) == 1
