"""Saves that a signal or the clock requests: on one rank is enough, and all save at the end of the same iteration.

The handler of a signal sets a flag, and rank 0 looks at its clock. At the end of an iteration, all ranks start an
asynchronous all-reduce of their flags, on a gloo group of its own; they read the result one iteration later, when it
has long arrived. So all ranks agree without waiting for each other more than training itself makes them wait. With the
flags goes the number of iterations until the next all-reduce: rank 0 chooses it by its clock, since each takes 0.3 to
1 ms of CPU time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from logging import LoggerAdapter
from types import FrameType
from typing import Any

from xhf_hooks.collective import Collective
from xhf_hooks.errors import OptionError
from xhf_hooks.system.child_processes import SignalProofChildren

_GO_ON = (signal.SIGUSR1, signal.SIGUSR2)
#: From one vote to the next: so much time, but not more iterations, since the next ones may take longer.
_VOTE_SECS, _MOST_ITERATIONS = 1.0, 16


def signal_numbers(signals: Sequence[str]) -> list[signal.Signals]:
    """The signals by their names."""
    return [signal.Signals[name] for name in signals]


class SaveRequests:
    """The save requests of one run, from :meth:`start` to :meth:`close`.

    After SIGUSR1 and SIGUSR2 training goes on; the user's handler, if any, is called at once. Any other signal takes
    effect after the save: it ends the process or calls the user's handler. Children of multiprocessing, such as data
    loader workers, survive the signals (:class:`.SignalProofChildren`). In another forked child, SIGUSR1 and SIGUSR2 do
    nothing, and other signals take effect at once.

    Python may call handlers in the main thread between any two instructions, so they take no lock.

    Args:
        ranks: Connects the ranks for the votes. No other object uses it: a save in the background may be using another
            one. It is closed with this object.
        interval_secs: As in :meth:`start`.
    """

    def __init__(self, log: LoggerAdapter, ranks: Collective, interval_secs: float | None) -> None:
        self._log, self._process = log, os.getpid()
        self._asked: str | None = None
        self._ending: signal.Signals | None = None
        self._waits = True  # whether signals that end the process wait for a save
        self._before: dict[signal.Signals, Any] = {}
        self._children: SignalProofChildren | None = None
        self._answer: Callable[[], list[int]] | None = None  # of the all-reduce in flight
        self._n_until_vote = 0  # iterations, the same on all ranks
        self._n_since_vote, self._voted_at, self._n_between_votes = 0, time.monotonic(), 0
        self._ranks = ranks
        self._interval_secs = interval_secs if ranks.rank == 0 else None
        self._clock_began = time.monotonic()

    @classmethod
    def start(cls, log: LoggerAdapter, signals: Sequence[str], interval_secs: float | None = None) -> SaveRequests:
        """From now on, handle the signals, and let the clock run. Runs on: all ranks.

        Args:
            signals: Names of the signals that request a save.
            interval_secs: After so many seconds without a save, the clock of rank 0 requests one; None: it never does.

        Raises:
            AgreedError: There are signals, and training is not in the main thread. The same on all ranks.
        """
        requests = cls(log, Collective.connect(), interval_secs)
        try:
            with requests._ranks.stage('preflight'):
                if signals and threading.current_thread() is not threading.main_thread():
                    raise OptionError('save_on_signal', 'None, since training is not in the main thread', signals)
                requests._handle_signals(signals)
        except BaseException:
            requests.close()
            raise
        return requests

    @property
    def ending_signal(self) -> signal.Signals | None:
        """The signal to this rank that will end the process after the save, if any."""
        return self._ending

    def is_due(self, *, vote_now: bool = False) -> bool:
        """Whether all ranks save now. Runs on: all ranks, at the end of each iteration.

        Args:
            vote_now: Wait until all ranks are here, so that requests up to now count: at the end of a validation, whose
                save has the weights of the last iteration, and of training, when there is no next iteration.

        Raises:
            RankLostError: A rank has died, or a connection broke. From then on it is False, until they connect again.
        """
        answer, self._answer = self._answer, None
        if not self._ranks.is_connected:
            return False
        is_due = answer is not None and self._read(answer)
        if vote_now and not is_due:
            is_due = self._read(self._start_vote())
        if is_due:
            self._asked = None
            self.restart_clock()  # before it is read again below
        if not vote_now:
            self._n_since_vote += 1
            self._n_until_vote -= 1
            if self._n_until_vote <= 0:
                self._answer = self._start_vote()
        return is_due

    def restart_clock(self) -> None:
        """Count the time without a save from now on."""
        self._clock_began = time.monotonic()

    def ensure_connected(self, collective: Collective) -> bool:
        """Connect again if the connections of a rank have broken; returns whether they had. Runs on: all ranks.

        Args:
            collective: Connects the ranks in any case; says whether one has lost its connection.

        Raises:
            RankLostError: Ranks could not connect.
        """
        if not collective.any(not self._ranks.is_connected, 'save_on_signal'):
            return False
        self._answer, self._n_until_vote = None, 0
        self._ranks.reconnect()
        return True

    def end_process_if_signaled(self) -> None:
        """Let a signal that ends the process take effect, if one came: the save is made, or there will be none.

        Runs on: the main thread.
        """
        number, self._ending = self._ending, None
        if number is not None:
            self._take_effect(number)

    def close(self) -> None:
        """Restore handlers. Needs no other rank. A signal may still wait for :meth:`end_process_if_signaled`."""
        self._waits = False
        if os.getpid() != self._process:
            return
        if self._children is not None:
            self._children.close()
        if self._asked is not None:
            self._log.warning(f'{self._asked}: no save was made: training has ended')
            self._asked = None
        self._ranks.close()
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, signal.SIG_IGN if before is None else before)

    def _handle_signals(self, signals: Sequence[str]) -> None:
        numbers = signal_numbers(signals)
        self._children = SignalProofChildren.start(numbers) if numbers else None
        if self._children is not None and self._children.is_server_older:
            self._log.warning(
                f'save_on_signal: the fork server of multiprocessing runs already. {"/".join(signals)} to the process '
                f'group of a rank, as torchrun and terminals send it, ends that server and its data loader workers '
                f'before the save: start no such process before the hook or callback begins'
            )
        for number in numbers:
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._handle)

    def _start_vote(self) -> Callable[[], list[int]]:
        """Start a vote of all ranks."""
        asked = self._asked
        if asked is not None:
            self._log.warning(f'{asked}: all ranks will save')
        is_due = asked is not None or self._is_clock_due
        n_iterations = self._choose_iterations()
        numbers = [is_due, n_iterations if self._ranks.rank == 0 else 0]
        return self._ranks.start_maxima(numbers, 'save_on_signal')

    def _read(self, answer: Callable[[], list[int]]) -> bool:
        """Whether all ranks save now; the answer has the iterations until the next vote, too."""
        is_due, self._n_until_vote = answer()
        return bool(is_due)

    def _choose_iterations(self) -> int:
        """How many iterations there are until the next vote, by the time that those since the last one took."""
        now = time.monotonic()
        secs = (now - self._voted_at) / max(self._n_since_vote, 1)
        self._voted_at, self._n_since_vote = now, 0
        if self._ranks.world_size == 1:  # a vote costs nothing
            return 1
        n_in_time = int(_VOTE_SECS / max(secs, 1e-6))
        self._n_between_votes = max(1, min(n_in_time, 2 * self._n_between_votes, _MOST_ITERATIONS))
        return self._n_between_votes

    @property
    def _is_clock_due(self) -> bool:
        return self._interval_secs is not None and time.monotonic() - self._clock_began >= self._interval_secs

    def _handle(self, given: int, frame: FrameType | None) -> None:
        number = signal.Signals(given)
        in_child = os.getpid() != self._process
        if number in _GO_ON:
            if not in_child:
                self._asked = number.name
                if callable(before := self._before[number]):
                    before(number, frame)
        elif in_child or not self._waits:
            self._ending = None
            self._take_effect(number)
        else:
            self._ending, self._asked = number, number.name

    def _take_effect(self, number: signal.Signals) -> None:
        before = self._before[number]
        if before is signal.SIG_IGN:
            return
        signal.signal(number, signal.SIG_DFL if before is None else before)
        if not callable(before):
            os.kill(os.getpid(), number)
            return
        before(number, sys._getframe())
        if self._waits:  # the user's handler lets training go on
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._handle)
