"""Who may ask for a save while a run trains: a signal to any rank, or a file."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from xhf_hooks.distributed.collective import Collective
from xhf_hooks.errors import OptionError
from xhf_hooks.on_demand.agreement import SaveAgreement
from xhf_hooks.on_demand.signals import SignalRequests
from xhf_hooks.telemetry.log import RunLog

#: Above all points of a run; after it there is no other.
_END = sys.maxsize // 4


class SaveRequests:
    """The requests of one run, agreed by all ranks. Runs on: all ranks must build it, in the same order.

    Args:
        signals: Names of those that ask.
        file: Rank 0 deletes it and asks, where it appears; None is no file.
        wait_secs: How long a signal that ends the process waits for a save.

    Raises:
        AgreedError: The ranks cannot agree on saves, or signals cannot be handled; the same on all ranks.
    """

    def __init__(
        self, collective: Collective, log: RunLog, *, signals: Sequence[str], file: Path | None, wait_secs: float
    ) -> None:
        self._log = log
        self._file = file if collective.rank == 0 else None
        self._file_asks = False
        self._process = os.getpid()
        self._told: str | None = None
        run = collective.broadcast(uuid.uuid4().hex)
        with ExitStack() as ending:
            with collective.stage('preflight'):
                store = dist.PrefixStore(f'xhf-save-{run}', own_store(collective.world_size))
                self._signals = SignalRequests(signals, wait_secs)
                ending.callback(self._signals.close)
            ending.pop_all()  # no rank has failed
        self._agreement = SaveAgreement(store, collective.rank, collective.world_size, self._is_wanted, self._on_lost)

    @property
    def must_end(self) -> bool:
        """Whether a signal to this rank waits for a save to end the process."""
        return self._signals.must_end

    def is_due(self, iterations_done: int, *, validated: bool = False) -> bool:
        """Whether all ranks save now. Runs on: all ranks, at the end of each iteration and of each validation.

        Costs no communication.

        Raises:
            RankLostError: The process group's store went away at the wrong instant.
        """
        return self._take_if_due(2 * iterations_done + validated)

    def is_due_at_end(self) -> bool:
        """As :meth:`is_due`, when training has ended; none is due later."""
        return self._take_if_due(_END)

    def end_process(self) -> None:
        """Let a signal that waits take its effect: the save is made, or there will be none."""
        self._signals.end()

    def close(self) -> None:
        """End the thread, restore the handlers. Needs no other rank. A signal may wait for :meth:`end_process` yet."""
        if os.getpid() == self._process:
            self._agreement.close()
        self._signals.close()

    def _take_if_due(self, point: int) -> bool:
        if not self._agreement.is_due(point):
            return False
        self._signals.take()
        self._file_asks, self._told = False, None
        return True

    def _is_wanted(self) -> bool:
        if self._signals.end_when_late():
            self._log.error('no save was made in the time that exit_wait_secs gives: the process ends without')
        self._look_for_file()
        asked = self._signals.asked or ('the file save_now' if self._file_asks else None)
        if asked is not None and asked != self._told:
            self._told = asked
            self._log.warning(f'{asked}: all ranks save at the end of the iteration')
        return asked is not None

    def _look_for_file(self) -> None:
        if self._file is None:
            return
        try:
            self._file.unlink()
            self._file_asks = True
        except FileNotFoundError:
            pass
        except OSError as error:
            self._log.error(f'{self._file} cannot be deleted, and is not looked at any more: {error}')
            self._file = None

    def _on_lost(self, error: Exception) -> None:
        self._signals.stop_waiting()
        if self._told is not None:
            self._log.error(f'{self._told} asked for a save, but ranks cannot agree on it: {error}')


def own_store(world_size: int) -> dist.Store:
    """A connection of its own: what the training thread waits for on its own connection must not hold up this one.

    Raises:
        OptionError: There is no store.
    """
    if world_size == 1:
        return dist.HashStore()
    try:
        return dist.distributed_c10d._get_default_store().clone()
    except (ValueError, RuntimeError, AttributeError) as error:
        raise OptionError(
            'save_on_signal, save_on_file, save_on_exception',
            f'none of them where torch.distributed has no store ({error})',
            True,
        ) from error
