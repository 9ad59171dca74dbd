"""Requests for a save during training: a signal to any rank."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import ExitStack

import torch.distributed as dist

from xhf_hooks.distributed.collective import Collective
from xhf_hooks.errors import OptionError
from xhf_hooks.on_demand.agreement import SaveAgreement
from xhf_hooks.on_demand.signals import SignalRequests
from xhf_hooks.telemetry.log import RunLog

#: Above all points of a run; the point after training.
_END = sys.maxsize // 4


class SaveRequests:
    """The save requests of one run, on which all ranks agree. Runs on: all ranks must build it, in the same order.

    Args:
        signals: Names of the signals that request a save.
        wait_secs: How long a signal that ends the process waits for the save.

    Raises:
        AgreedError: The ranks cannot agree on saves, or signals cannot be handled. The same on all ranks.
    """

    def __init__(self, collective: Collective, log: RunLog, *, signals: Sequence[str], wait_secs: float) -> None:
        self._log = log
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
        """Whether a signal to this rank will end the process after the save."""
        return self._signals.must_end

    def is_due(self, iterations_done: int, *, validated: bool = False) -> bool:
        """Whether all ranks save now. Runs on: all ranks, at the end of each iteration and of each validation.

        Costs no communication.

        Raises:
            RankLostError: The process group's store was lost while the ranks were agreeing.
        """
        return self._take_if_due(2 * iterations_done + validated)

    def is_due_at_end(self) -> bool:
        """As :meth:`is_due`, at the end of training. No save is due afterwards."""
        return self._take_if_due(_END)

    def end_process(self) -> None:
        """Let a pending signal take effect: the save is made, or there will be none."""
        self._signals.end()

    def close(self) -> None:
        """End the thread, restore handlers. Needs no other rank. A signal may still wait for :meth:`end_process`."""
        if os.getpid() == self._process:
            self._agreement.close()
        self._signals.close()

    def _take_if_due(self, point: int) -> bool:
        if not self._agreement.is_due(point):
            return False
        self._signals.take()
        self._told = None
        return True

    def _is_wanted(self) -> bool:
        if self._signals.end_when_late():
            self._log.error('no save was made within exit_wait_secs; the process ends without one')
        asked = self._signals.asked
        if asked is not None and asked != self._told:
            self._told = asked
            self._log.warning(f'{asked}: all ranks will save at the end of the iteration')
        return asked is not None

    def _on_lost(self, error: Exception) -> None:
        self._signals.stop_waiting()
        if self._told is not None:
            self._log.error(f'{self._told} requested a save, but the ranks cannot agree on it: {error}')


def own_store(world_size: int) -> dist.Store:
    """A separate connection to the process group's store, which the training thread's requests cannot block.

    Raises:
        OptionError: There is no store.
    """
    if world_size == 1:
        return dist.HashStore()
    try:
        return dist.distributed_c10d._get_default_store().clone()
    except (ValueError, RuntimeError, AttributeError) as error:
        raise OptionError(
            'save_on_signal', f'None, since torch.distributed has no store here ({error})', True
        ) from error
