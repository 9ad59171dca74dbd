"""A save after an exception that nobody catches: whether all ranks have come to that, and so can make it.

Ranks raise at different instants, or one alone, while the others wait for it in a collective of training. So nothing
collective may begin before all are known to be here. They agree through the process group's key-value store, within a
time limit; the first decision counts for all, by a compare-and-set.
"""

from __future__ import annotations

import enum
import os
import sys
import time
import uuid
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

from xhf_hooks.distributed.collective import Collective
from xhf_hooks.errors import XhfError
from xhf_hooks.on_demand.save_requests import own_store
from xhf_hooks.telemetry.log import RunLog

#: For how long a rank that has raised waits for the others.
WAIT_SECS = 30.0
_POLL_SECS = 0.05
_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Decision(enum.IntEnum):
    """What ranks that have raised decide."""

    SAVE = 1
    #: Not all ranks came in time.
    SOME_ARE_MISSING = 2
    #: They did, but after different numbers of iterations.
    STEPS_DIFFER = 3


_WHY_NOT = {
    Decision.SOME_ARE_MISSING: f'not all ranks had one within {WAIT_SECS:.0f} s',
    Decision.STEPS_DIFFER: 'ranks had it after different numbers of iterations',
}


def decide(store: dist.Store, rank: int, world_size: int, iteration: int, wait_secs: float) -> Decision:
    """Wait for the other ranks. Runs on: every rank that has raised; the same decision for all.

    Args:
        store: Under a prefix of this run; once used, it is of no more use.
        iteration: That this rank has done.
    """
    store.set(f'iteration/{rank}', str(iteration))
    here, deadline = store.add('here', 1), time.monotonic() + wait_secs
    while not (made := store.add('decision', 0)):  # makes the key, too
        decision = None
        if here == world_size:
            others = {int(store.get(f'iteration/{other}')) for other in range(world_size)}
            decision = Decision.SAVE if len(others) == 1 else Decision.STEPS_DIFFER
        elif time.monotonic() > deadline:
            decision = Decision.SOME_ARE_MISSING
        if decision is not None:
            made = int(store.compare_set('decision', '0', str(int(decision))))
            break
        time.sleep(_POLL_SECS)
        here = store.add('here', 0)
    return Decision(made)


class UncaughtExceptions:
    """Calls a function when an exception is about to end the process of every rank, before Python reports it.

    Not for exceptions that somebody catches (a notebook, a sweep): the model is still in memory then. Nor for Ctrl-C
    and exits, nor for errors of this package's own saves. Runs on: all ranks must build it, in the same order, in the
    main thread.

    Args:
        iterations_done: By this rank; None before the first.
        save: Called on all ranks with the exception. What it raises is logged.

    Raises:
        AgreedError: The ranks cannot agree; the same on all ranks.
    """

    def __init__(
        self,
        collective: Collective,
        log: RunLog,
        *,
        iterations_done: Callable[[], int | None],
        save: Callable[[Exception], None],
    ) -> None:
        self._rank, self._world_size, self._log = collective.rank, collective.world_size, log
        self._iterations_done, self._save = iterations_done, save
        run = collective.broadcast(uuid.uuid4().hex)
        with collective.stage('preflight'):
            self._store = dist.PrefixStore(f'xhf-exception-{run}', own_store(collective.world_size))
        self._process, self._is_open = os.getpid(), True
        self._before: _ExceptHook = sys.excepthook
        sys.excepthook = self._handle

    def close(self) -> None:
        """Restore the previous hook; where another has come since, it stays."""
        self._is_open = False
        if sys.excepthook == self._handle:
            sys.excepthook = self._before

    def _handle(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        try:
            is_open, self._is_open = self._is_open and os.getpid() == self._process, False
            if is_open and isinstance(error, Exception) and not isinstance(error, XhfError):
                self._save_if_agreed(error)
        except Exception as another:  # the first one counts
            self._log.error(f'the weights were not saved after the exception: {type(another).__name__}: {another}')
        finally:
            self._before(kind, error, where)

    def _save_if_agreed(self, error: Exception) -> None:
        done = self._iterations_done()
        if done is None:
            return
        text = f'{type(error).__name__}: {error}'
        self._log.error(f'training ends by {text[:300]}; the weights are saved if it is so on all ranks')
        decision = decide(self._store, self._rank, self._world_size, done, WAIT_SECS)
        if decision is Decision.SAVE:
            self._save(error)
        else:
            self._log.error(f'the weights are not saved after the exception: {_WHY_NOT[decision]}')
