"""Lets ranks agree on the point of training at which all of them save, without a collective in training.

Each rank has a thread that reads a counter in the process group's key-value store twice a second. A *point* is a
number that grows during training; all ranks pass the same points in the same order, each at its own time. A round of
the agreement uses these keys of the store:

1. *asked*: a rank that wants a save adds 1, and every thread sees it.
2. *here*: every thread adds 1 and waits until all have. Training goes on. If a rank has died or left, the round ends
   here.
3. *held*: every thread closes its gate, at which the training thread waits before it passes another point, and then
   reports the last point that was passed.
4. *target*: when all have reported, rank 0 writes the highest of these points, plus 1. Every thread reads it and opens
   its gate. Each rank saves at the first point that is not below the target.

All ranks save at the same point. The target is written once (compare-and-set), so it is the same for all. It is
computed from points reported behind closed gates, which open only when the target is known, so every point that any
rank has passed by then is below it. The first point not below it is therefore ahead of every rank, and it is the same
one for all, since all pass the same points. A rank begins the next round only after it has passed that point.

No rank waits forever. While gates are closed, threads wait only for other threads, never for training, which may be
inside a collective whose peer is at its gate. If a thread does not answer, because its process has just died, another
one cancels the round after a time limit, with the same compare-and-set: the target or the cancellation counts for all,
whichever came first. A rank that leaves in step 2 cancels the round at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch.distributed import Store

from xhf_hooks.errors import RankLostError

_POLL_SECS = 0.5
#: Seconds between reads of the store while the gates are closed.
_HELD_POLL_SECS = 0.005
#: Longest time that gates stay closed. All threads have just answered, so one that no longer does has died.
_HELD_SECS = 30.0
#: Written in place of a target when a round is cancelled.
_CANCELLED = -1


class SaveAgreement:
    """Agrees with the other ranks on the point of a save. Runs on: all ranks.

    Args:
        store: A store that all ranks reach, with a prefix for this run.
        is_wanted: Returns whether this rank wants a save. The thread calls it several times a second.
        on_lost: The thread calls it when the store can no longer be reached.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        is_wanted: Callable[[], bool],
        on_lost: Callable[[Exception], None],
        *,
        poll_secs: float = _POLL_SECS,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._is_wanted, self._on_lost, self._poll_secs = is_wanted, on_lost, poll_secs
        self._gate = threading.Condition()
        self._is_closed = False
        self._passed = 0
        self._target: int | None = None
        self._lost: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name='xhf-save-agreement', daemon=True)
        self._thread.start()

    def is_due(self, point: int) -> bool:
        """Whether all ranks save at this point. Runs on: the training thread of all ranks, at each common point.

        Args:
            point: At least 1. A point that is not above all earlier ones is ignored.

        Raises:
            RankLostError: The store was lost while the ranks were agreeing, so others may have begun to save.
        """
        with self._gate:
            while self._is_closed:
                self._gate.wait()
            if self._lost is not None:
                raise RankLostError(
                    f"rank {self._rank} lost the process group's store while ranks agreed on a save: {self._lost}"
                ) from self._lost
            if point <= self._passed:
                return False
            self._passed = point
            if self._target is None or point < self._target:
                return False
            self._target = None
            return True

    def close(self) -> None:
        """End the thread. Needs no other rank, and waits no longer than gates may stay closed."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        number = 0
        try:
            while self._pause(self._poll_secs):
                wanted = self._is_wanted()
                with self._gate:
                    if self._target is not None:
                        continue  # of the round before
                if self._store.add(f'{number}/asked', int(wanted)):
                    self._agree(str(number))
                    number += 1
        except Exception as error:
            self._on_lost(error)

    def _agree(self, name: str) -> None:
        here = self._store.add(f'{name}/here', 1)
        while here < self._world_size:
            if not self._pause(self._poll_secs / 4):
                self._decide(name, _CANCELLED)
                return
            self._is_wanted()
            here = self._store.add(f'{name}/here', 0)
        with self._gate:
            self._is_closed = True
            passed = self._passed
        target = _CANCELLED
        try:
            target = self._find_target(name, passed)
        except Exception as error:
            self._lost = error
            raise
        finally:
            with self._gate:
                self._target = None if target == _CANCELLED else target
                self._is_closed = False
                self._gate.notify_all()

    def _find_target(self, name: str, passed: int) -> int:
        self._store.set(f'{name}/passed/{self._rank}', str(passed))
        self._store.add(f'{name}/held', 1)
        deadline = time.monotonic() + _HELD_SECS
        while True:
            target = self._store.add(f'{name}/target', 0)
            if target:
                return target
            if self._rank == 0 and self._store.add(f'{name}/held', 0) == self._world_size:
                points = (self._store.get(f'{name}/passed/{rank}') for rank in range(self._world_size))
                return self._decide(name, 1 + max(map(int, points)))
            if time.monotonic() > deadline:
                return self._decide(name, _CANCELLED)
            time.sleep(_HELD_POLL_SECS)

    def _decide(self, name: str, target: int) -> int:
        """Write the outcome of a round unless there is one already; returns the one that counts."""
        self._store.add(f'{name}/target', 0)  # creates the key
        return int(self._store.compare_set(f'{name}/target', '0', str(target)))

    def _pause(self, secs: float) -> bool:
        """Sleep; returns False if the thread must end."""
        return not self._stop.wait(secs)
