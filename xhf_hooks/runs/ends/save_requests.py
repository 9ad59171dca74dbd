"""Saves that a signal or the clock requests: on one rank is enough, and all save at the end of the same iteration.

The handler of a signal (:class:`.ProcessSignals`) sets a flag, and rank 0 looks at its clock. At the end of an
iteration, all ranks start an asynchronous all-reduce of their flags, on a gloo group of its own; they read the result
one iteration later, when it has long arrived. So all ranks agree without waiting for each other more than training
itself makes them wait. With the flags goes the number of iterations until the next all-reduce: rank 0 chooses it by its
clock, since each takes 0.3 to 1 ms of CPU time.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from logging import LoggerAdapter

from xhf_hooks.errors import OptionError
from xhf_hooks.ranks.collective import Collective

#: From one vote to the next: so much time, but not more iterations, since the next ones may take longer.
_VOTE_SECS, _MOST_ITERATIONS = 1.0, 16


class SaveRequests:
    """The save requests of one run, from :meth:`start` to :meth:`close`: votes, and the clock.

    Args:
        ranks: Connects the ranks for the votes, and for nothing else. It is closed with this object.
        interval_secs: As in :meth:`start`.
    """

    def __init__(self, log: LoggerAdapter, ranks: Collective, interval_secs: float | None) -> None:
        self._log = log
        self._asked: str | None = None
        self._answer: Callable[[], list[int]] | None = None  # of the all-reduce in flight
        self._n_until_vote = 0  # iterations, the same on all ranks
        self._n_since_vote, self._voted_at, self._n_between_votes = 0, time.monotonic(), 0
        self._ranks = ranks
        self._interval_secs = interval_secs if ranks.rank == 0 else None
        self._clock_began = time.monotonic()

    @classmethod
    def start(
        cls, log: LoggerAdapter, signals: Sequence[signal.Signals], interval_secs: float | None = None
    ) -> SaveRequests:
        """From now on, take requests, and let the clock run. Runs on: all ranks.

        Args:
            signals: The signals that will request a save (:meth:`ask`).
            interval_secs: After so many seconds without a save, the clock of rank 0 requests one; None: it never does.

        Raises:
            AgreedError: There are signals, and training is not in the main thread. The same on all ranks.
        """
        requests = cls(log, Collective.connect(), interval_secs)
        try:
            with requests._ranks.stage('preflight of save_on_signal'):
                if signals and threading.current_thread() is not threading.main_thread():
                    names = [number.name for number in signals]
                    raise OptionError('save_on_signal', 'None, since training is not in the main thread', names)
        except BaseException:
            requests.close()
            raise
        return requests

    def ask(self, number: signal.Signals) -> None:
        """Ask for a save. Runs on: a signal handler, so it takes no lock."""
        self._asked = number.name

    def mark_answered(self) -> None:
        """A save has just been made: it answers the requests that came to this rank meanwhile."""
        self._asked = None

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
        if not collective.vote_any(not self._ranks.is_connected, 'save_on_signal'):
            return False
        self._answer, self._n_until_vote = None, 0
        self._ranks.reconnect()
        return True

    def close(self) -> None:
        """Take no more requests. Needs no other rank."""
        if self._asked is not None:
            self._log.warning(f'{self._asked}: no save was made: training has ended')
            self._asked = None
        self._ranks.close()

    def _start_vote(self) -> Callable[[], list[int]]:
        """Start a vote of all ranks."""
        asked = self._asked
        if asked is not None:
            self._log.warning(f'{asked}: all ranks will save')
        is_clock_due = self._interval_secs is not None and time.monotonic() - self._clock_began >= self._interval_secs
        n_iterations = self._choose_iterations()
        numbers = [asked is not None or is_clock_due, n_iterations if self._ranks.rank == 0 else 0]
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
