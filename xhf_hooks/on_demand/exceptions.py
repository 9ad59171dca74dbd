"""Decides whether all ranks have an uncaught exception, and so can save together before the run ends.

Ranks raise at different times, or only one does, while the others wait for it in a collective of training. No
collective may begin before all ranks are known to have raised. They agree through the process group's key-value store,
within a time limit. The first decision counts for all (compare-and-set).
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

#: How long a rank that has raised waits for the others.
WAIT_SECS = 30.0
_POLL_SECS = 0.05
_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Decision(enum.IntEnum):
    """What the ranks that have raised decide."""

    SAVE = 1
    #: Not all ranks raised in time.
    SOME_ARE_MISSING = 2
    #: All did, but after different numbers of iterations.
    STEPS_DIFFER = 3


_WHY_NOT = {
    Decision.SOME_ARE_MISSING: f'not all ranks raised one within {WAIT_SECS:.0f} s',
    Decision.STEPS_DIFFER: 'ranks raised it after different numbers of iterations',
}


def decide(store: dist.Store, rank: int, world_size: int, iteration: int, wait_secs: float) -> Decision:
    """Wait for the other ranks and decide. Runs on: every rank that has raised, with the same result.

    Args:
        store: A store with a prefix for this run. It cannot be used again.
        iteration: Number of iterations that this rank has finished.
    """
    store.set(f'iteration/{rank}', str(iteration))
    here, deadline = store.add('here', 1), time.monotonic() + wait_secs
    while not (made := store.add('decision', 0)):  # also creates the key
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
    """Calls a function when an uncaught exception is about to end every rank, before Python reports it.

    Exceptions that are caught (in a notebook or a sweep) do not count, since the model stays in memory. Neither do
    Ctrl-C, exits, and errors of this package's own saves. Runs on: all ranks must build it, in the same order, in the
    main thread.

    Args:
        iterations_done: Returns the number of iterations that this rank has finished; None before the first.
        save: Called on all ranks with the exception. Its errors are logged.

    Raises:
        AgreedError: The ranks cannot agree. The same on all ranks.
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
        """Restore the previous ``sys.excepthook``, unless another one has been set since."""
        self._is_open = False
        if sys.excepthook == self._handle:
            sys.excepthook = self._before

    def _handle(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        try:
            is_open, self._is_open = self._is_open and os.getpid() == self._process, False
            if is_open and isinstance(error, Exception) and not isinstance(error, XhfError):
                self._save_if_agreed(error)
        except Exception as another:  # the original exception is the one to report
            self._log.error(f'the weights were not saved after the exception: {type(another).__name__}: {another}')
        finally:
            self._before(kind, error, where)

    def _save_if_agreed(self, error: Exception) -> None:
        done = self._iterations_done()
        if done is None:
            return
        text = f'{type(error).__name__}: {error}'
        self._log.error(f'training ends with {text[:300]}; the weights are saved if all ranks raise an exception')
        decision = decide(self._store, self._rank, self._world_size, done, WAIT_SECS)
        if decision is Decision.SAVE:
            self._save(error)
        else:
            self._log.error(f'the weights are not saved after the exception: {_WHY_NOT[decision]}')
