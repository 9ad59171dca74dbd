"""A run that requests saves: hooks that send signals at chosen or random instants, and slow phases to hit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

SIGNAL = signal.SIGUSR2  # the test harness uses SIGUSR1


@HOOKS.register_module()
class RandomSignals(Hook):
    """Sends signals to one rank, each at a random instant after the save that the previous one requested.

    Attributes:
        saved: Iterations saved on demand; the same on all ranks.
        sent: Iterations done at each signal that this rank received, by number.
    """

    priority = 99  # after the hook that saves
    newest: RandomSignals | None = None

    def __init__(self, n_signals: int, seed: int) -> None:
        self._n_signals, self._random = n_signals, random.Random(seed)
        self._n_sent = 0
        self.saved: list[int] = []
        self.sent: dict[int, int] = {}
        RandomSignals.newest = self

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if not self._n_sent:
            self._count_saves(runner)
        if len(self.saved) == self._n_signals:
            runner.train_loop.stop_training = True
        elif len(self.saved) == self._n_sent:
            self._send_next(runner)

    def _count_saves(self, runner: Any) -> None:
        """Also counts requests for an iteration that was already saved."""
        saves = next(hook for hook in runner.hooks if type(hook).__name__ == 'HFCheckpointHook')._saves
        is_due, save_if_asked = saves._requests.is_due, saves.save_if_asked
        found: list[bool] = []

        def noted(**how: bool) -> bool:
            found.append(is_due(**how))
            return found[-1]

        def counted(step: Any, **how: bool) -> None:
            save_if_asked(step, **how)
            if found.pop():
                self.saved.append(step.iteration)

        saves._requests.is_due, saves.save_if_asked = noted, counted

    def _send_next(self, runner: Any) -> None:
        self._n_sent += 1
        rank, delay = self._random.randrange(dist.get_world_size()), self._random.random() * 0.06
        number = len(self.saved)

        def send() -> None:
            self.sent[number] = runner.iter  # one less if the end of the iteration was not counted yet
            os.kill(os.getpid(), SIGNAL)

        if dist.get_rank() == rank:
            threading.Timer(delay, send).start()


@HOOKS.register_module()
class AtIteration(Hook):
    """Sends a signal to all ranks, one after another, at an iteration; or to one rank, in the validation after it."""

    def __init__(self, iteration: int, ask: str, in_validation_of_rank: int | None = None) -> None:
        self._iteration, self._ask, self._rank = iteration, ask, in_validation_of_rank

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        time.sleep(0.01)
        if self._rank is None and runner.iter == self._iteration:
            time.sleep(0.05 * dist.get_rank())
            os.kill(os.getpid(), getattr(signal, self._ask))

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if self._rank is not None and runner.iter == self._iteration:
            time.sleep(0.05)
            if batch_idx == 0 and dist.get_rank() == self._rank:
                os.kill(os.getpid(), getattr(signal, self._ask))
