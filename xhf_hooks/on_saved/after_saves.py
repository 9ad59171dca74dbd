"""Runs the ``on_saved`` command for one save after another, in a thread of rank 0."""

from __future__ import annotations

import atexit
import os
import queue
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.commit.kept_folder import KeptFolder
from xhf_hooks.commit.store_folder import StoreFolder
from xhf_hooks.commit.target import SaveTarget
from xhf_hooks.config.options import CallOptions, RunOptions
from xhf_hooks.distributed.collective import Collective
from xhf_hooks.errors import OptionError, XhfError
from xhf_hooks.on_saved.command import RunningCommand, fill_in
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.stores.publication import StoredSave
from xhf_hooks.telemetry.log import RunLog

LOG_NAME = 'output.log'
#: More than the supervisor needs to end a command.
_END_SECS = 15.0
#: Seconds between two checks of the other ranks whether everything is done.
_LOOK_SECS = 5.0


@dataclass(frozen=True)
class Result:
    """The numbers that ``on_saved`` printed for a save.

    Attributes:
        name: Name of the save's folder, such as ``hf_model``.
    """

    name: str
    step: Step
    numbers: Mapping[str, float]

    def scalars(self) -> dict[str, float]:
        """The numbers with names for a visualizer, such as ``on_saved/hf_model/accuracy``."""
        return {f'on_saved/{self.name}/{name}': value for name, value in self.numbers.items()}


@dataclass(frozen=True)
class _Save:
    """A save to run the command for.

    Attributes:
        held: Keeps its files, on the disk or in a store, until it is released.
        output: Folder for results.
    """

    name: str
    step: Step
    held: KeptFolder | StoredSave
    output: Path

    @property
    def what(self) -> str:
        return _what(self.name, self.step)

    @property
    def path(self) -> Path | str:
        """What the command gets as ``{path}``."""
        return self.held.url if isinstance(self.held, StoredSave) else self.held.path


def _what(name: str, step: Step) -> str:
    return f'on_saved for {name}, {step.label}'


class AfterSaves:
    """Runs a command after each save. Runs on: rank 0; the training thread builds, starts, queries and closes it.

    A new save replaces a waiting one of the same name. Failures are logged and never stop training.

    Args:
        command: Its arguments, with placeholders (:func:`fill_in`).
        run_dir: Local folder of the run, for results where saves are only in a store.
        timeout_secs: Time limit of the command.
    """

    def __init__(self, command: Sequence[str], log: RunLog, *, timeout_secs: float, run_dir: Path = Path()) -> None:
        self._command, self._log, self._timeout_secs, self._run_dir = command, log, timeout_secs, run_dir
        self._process = os.getpid()
        self._change = threading.Condition()
        self._waiting: list[_Save] = []
        self._now: _Save | None = None
        self._running: RunningCommand | None = None
        self._closed = False
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        # A daemon: close() ends its work, or the end of training waits for it for a limited time
        self._thread = threading.Thread(target=self._run, name='xhf-on-saved', daemon=True)

    def start(self) -> None:
        """Begin. From now on, :meth:`close` must be called."""
        self._thread.start()
        atexit.register(self.close)

    def committed(self, save: CommittedCheckpoint, target: SaveTarget) -> None:
        """Queue the save that was just committed to a target, before its next save begins."""
        try:
            held = target.keep() if isinstance(target, StoreFolder) else KeptFolder.keep(target.final)
        except (XhfError, OSError) as error:
            self._log.error(f'{_what(target.name, save.step)} was skipped: {error}')
            return
        beside = self._run_dir if isinstance(held, StoredSave) else target.final.parent
        new = _Save(target.name, save.step, held, beside / f'{target.name}_on_saved' / save.step.label)
        with self._change:
            too_late = self._closed
            superseded = [old for old in self._waiting if old.name == new.name]
            if not too_late:
                self._waiting = [old for old in self._waiting if old not in superseded] + [new]
            self._change.notify_all()
        if too_late:
            self._drop(new)
            return
        for old in superseded:
            self._log.info(f'{old.what} was skipped: there is a newer save, and an earlier one is not finished yet')
            old.held.release()

    def _drop(self, save: _Save) -> None:
        self._log.warning(f'{save.what} was skipped: training has ended')
        save.held.release()

    def results(self) -> list[Result]:
        """The results since the last call."""
        found = []
        while not self._results.empty():
            found.append(self._results.get())
        return found

    def wait(self, secs: float) -> bool:
        """Wait until nothing is left to do; returns False if time ran out."""
        with self._change:
            return self._change.wait_for(lambda: self._now is None and not self._waiting, secs)

    def close(self) -> None:
        """End what is running, drop what is waiting, release all folders. Does nothing in a forked child."""
        if os.getpid() != self._process or self._closed:
            return
        atexit.unregister(self.close)
        with self._change:
            self._closed = True
            dropped, self._waiting = self._waiting, []
            now = self._now
            if self._running is not None:
                self._running.end()
            self._change.notify_all()
        for save in dropped:
            self._drop(save)
        if now is not None:
            self._thread.join(_END_SECS)

    def _run(self) -> None:
        while (save := self._next()) is not None:
            began = time.monotonic()
            try:
                self._do(save, began)
            except Exception as error:
                self._log.error(
                    f'{save.what} failed after {time.monotonic() - began:.1f} s; training goes on: {error}. '
                    f'Its output is in {save.output / LOG_NAME}'
                )
            save.held.release()
            with self._change:
                self._now = self._running = None
                self._change.notify_all()

    def _next(self) -> _Save | None:
        """Wait for the next save; None when closed."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            self._now = self._waiting.pop(0)
            return self._now

    def _do(self, save: _Save, began: float) -> None:
        found = self._run_command(save)
        if found:
            self._results.put(Result(save.name, save.step, found))
        shown = ', '.join(f'{name} {value:.4g}' for name, value in list(found.items())[:8])
        self._log.info(f'{save.what} took {time.monotonic() - began:.1f} s{": " * bool(shown)}{shown}')

    def _run_command(self, save: _Save) -> dict[str, float]:
        save.output.mkdir(parents=True, exist_ok=True)
        values = {'path': save.path, 'step': save.step.iteration, 'label': save.step.label, 'output': save.output}
        command = fill_in(self._command, values)
        with self._change:
            if self._closed:
                return {}
            self._running = running = RunningCommand(command, save.output / LOG_NAME, self._timeout_secs)
        return running.wait()


def after_saves_of_run(options: RunOptions | CallOptions, log: RunLog, run_dir: Path) -> AfterSaves | None:
    """The runner of the option ``on_saved``; None if it is not set. Runs on: rank 0.

    Raises:
        OptionError: There is no such program.
    """
    if options.on_saved is None:
        return None
    if shutil.which(options.on_saved[0]) is None:
        raise OptionError('on_saved', 'a program on the PATH of rank 0, or its full path', options.on_saved[0])
    return AfterSaves(options.on_saved, log, timeout_secs=options.on_saved_timeout_secs, run_dir=run_dir)


def wait_for_all(after_saves: AfterSaves | None, collective: Collective, secs: float, log: RunLog) -> None:
    """After training, wait until nothing is left to do. Runs on: all ranks.

    The other ranks wait on gloo, a short time at a time, since an NCCL collective may follow training.

    Args:
        after_saves: None on other ranks than rank 0.

    Raises:
        RankLostError: A rank did not take part.
    """
    deadline = time.monotonic() + secs
    if after_saves is not None and not after_saves.wait(0.0):
        log.info('waiting for on_saved')
    while True:
        left_secs = deadline - time.monotonic()
        waits = after_saves is not None and not after_saves.wait(max(0.0, min(_LOOK_SECS, left_secs)))
        if waits and left_secs <= _LOOK_SECS:
            log.error(f'on_saved did not finish within exit_wait_secs={secs:g} s')
            waits = False
        if not collective.broadcast(waits):
            return
