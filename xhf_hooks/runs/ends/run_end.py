"""How a run ends: one object, with one ordered list of what an end waits for, however it comes.

The list: the save in flight; deletions; uploads; the command of ``on_saved``; then folders are unlocked, and process
groups destroyed. Uploads, commands and saves in the background log their outcomes themselves, with their steps, in
their own threads; so an end only has to wait for them, for up to ``exit_wait_secs``.

=======================================  =============================================================================
training ends                            :meth:`RunEnd.wait_on_all_ranks`: all ranks wait for the tasks of all
then; ``close()`` of hook or callback;   :meth:`RunEnd.close`: this rank waits for the save, deletions and uploads,
the next run with the folder or signals  ends commands, unlocks folders and destroys process groups
garbage collection of the run            the same, in a thread; the next run with the folder waits for it
the interpreter exits, whatever ended    ``RunEnd.close(process_ends=True)``: the same, but nothing is waited for longer
training (Ctrl-C and sys.exit, too)      than ``exit_wait_secs``; before other exit handlers (:class:`.ProcessSignals`)
SIGTERM, SIGHUP, SIGXCPU                 the same in a thread, while training pauses at the end of its iteration; then
                                         the process ends; if the user handles the signal,
                                         :meth:`RunEnd.wait_before_exit`, then the user's handler
a signal of ``save_on_signal``           a save; then the process ends as in the row above (after SIGUSR1 and SIGUSR2
                                         training goes on)
a forked child ends                      nothing: its parent goes on
``os._exit``, SIGKILL, other signals     nothing can be logged; what was committed is whole
=======================================  =============================================================================
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from logging import LoggerAdapter
from pathlib import Path
from signal import Signals
from typing import Any, ClassVar

from xhf_hooks.errors import TargetError
from xhf_hooks.format.checksum import crc32
from xhf_hooks.options import CallOptions, RunOptions
from xhf_hooks.places.background_deletion import BackgroundDeletion
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.ends.background_task import BackgroundTask
from xhf_hooks.runs.ends.process_signals import ProcessSignals
from xhf_hooks.runs.ends.save_requests import SaveRequests
from xhf_hooks.system.child_processes import SignalProofChildren

#: While ranks wait for each other's tasks, they vote this often. Signals are handled between two votes.
_WAIT_SECS = 5.0
#: While a rank waits alone, it shows this often that the run is ending (:meth:`.RunLock.show_progress`).
_SHOW_SECS = 1.0


#: What an end waits for.
Task = BackgroundTask[Any] | BackgroundDeletion


class RunEnd:
    """The end of one run, from :meth:`begin` to :meth:`close`.

    It refers to neither model nor run, so that an end can wait for it when both are garbage. In a forked child, whose
    parent goes on, its methods do nothing.

    Hooks and callbacks are not notified when an exception or Ctrl-C interrupts training. So the next run that needs
    the folder or the signals of an interrupted one (a notebook, a sweep, Trainer's auto_find_batch_size) closes it.

    Args:
        targets: The folders of its saves: no two open runs have one in common.
        trainer: Identifies the run, such as MMEngine's runner; None for a call of ``save_hf``.
        options: ``exit_wait_secs`` counts from the first wait after a save.

    Attributes:
        save_signals: The signals that request a save.
        signals: The owner of signals, which knows this run from :meth:`listen` on.
        requests: None if neither a signal nor the clock can request a save.
        thread: The one that trains.
        is_closed: Whether the run may save no more.
    """

    #: Of the process, since the locks of folders belong to it and frontends know nothing of each other.
    _open: ClassVar[list[RunEnd]] = []
    #: By folder: checksums of the manifests that closed runs of this process have written there.
    _written: ClassVar[dict[Path, set[int]]] = {}

    def __init__(
        self,
        targets: Sequence[CheckpointFolder],
        trainer: object | None,
        options: RunOptions | CallOptions,
        log: LoggerAdapter,
    ) -> None:
        self.save_signals = [Signals[name] for name in options.save_on_signal or ()]
        self.requests: SaveRequests | None = None
        self.thread = threading.current_thread()
        self.is_closed = False
        self._targets = targets
        self._places = {str(target.path) for target in targets}
        self._trainer = None if trainer is None else weakref.ref(trainer)
        self._options, self._log = options, log
        self._process = os.getpid()
        self.signals = ProcessSignals.of_this_process()
        self._children: SignalProofChildren | None = None
        self._tasks: list[Task] = []
        self._last = ExitStack()
        self._deadline: float | None = None
        self._given_up: set[str] = set()  # names of tasks that were logged as not finished
        self._closing = threading.RLock()

    def begin(self) -> None:
        """Close earlier runs that have a folder or a signal of this one; then this run is open.

        A save that ``save_hf`` has in flight in the folder is waited for.

        Raises:
            TargetError: Another hook of this run has the folder, or a call of ``save_hf`` that has not ended.
        """
        trainer = None if self._trainer is None else self._trainer()
        for other in [*RunEnd._open]:
            both = self._places & other._places
            is_same = trainer is not None and other._trainer is not None and other._trainer() is trainer
            if not other.is_of_this_process or not (both or {*self.save_signals} & {*other.save_signals}):
                continue
            if both and is_same:
                raise TargetError(
                    f'another hook of this run already saves to {min(both)}: is it listed twice in custom_hooks (or '
                    f'callbacks)? If both are meant, set out_dir of one of them'
                )
            if both and other._trainer is None and not other.has_tasks:
                raise TargetError(
                    f'{min(both)} is in use by another run of this process; set out_dir to a folder of another name'
                )
            if not is_same:
                if other._trainer is not None:
                    self._log.warning(f'{min(other._places)}: an earlier run was interrupted and is now closed')
                other.close()
        RunEnd._open.append(self)

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, whose parent goes on with the run."""
        return self._process == os.getpid()

    @property
    def has_tasks(self) -> bool:
        """Whether work of this run goes on beside training, for which a signal that ends the process waits."""
        return any(isinstance(task, BackgroundTask) for task in self._tasks)

    def add_task(self, task: Task) -> None:
        """An end waits for this task, too, after those that were added before."""
        self._tasks.append(task)

    def do_last(self, function: Callable[[], object]) -> None:
        """When the run is closed and the process goes on, call this before the functions that were given before."""
        self._last.callback(function)

    def listen(self) -> None:
        """From now on, signals and the exit heed this run, and the clock runs. Runs on: all ranks.

        Raises:
            AgreedError: There are signals, and training is not in the main thread. The same on all ranks.
        """
        minutes = self._options.interval_minutes
        if self.save_signals or minutes is not None:
            interval_secs = None if minutes is None else 60 * minutes
            self.requests = SaveRequests.start(self._log, self.save_signals, interval_secs)
        if self.save_signals:
            self._children = SignalProofChildren.start(self.save_signals, self._log.warning)
        self.signals.add(self)

    def reset_wait_deadline(self) -> None:
        """A save begins: the next wait may take the whole time again."""
        self._deadline = None
        self._given_up.clear()

    def wait(self, secs: float = math.inf, *, for_all: bool = True) -> bool:
        """Returns whether nothing is left to wait for: the work has ended, or may not take longer. Needs no other rank.

        Args:
            secs: How long to wait for each task at most.
            for_all: Also wait for tasks that need not finish.
        """
        is_first = self._deadline is None
        if self._deadline is None:
            self._deadline = time.monotonic() + self._options.exit_wait_secs
        for task in [task for task in self._tasks if for_all or task.must_finish]:
            if is_first and task.left():
                self._log.info(f'waiting for {task.name}')
            left_secs = max(0.0, self._deadline - time.monotonic())
            if not task.wait(min(secs, left_secs)):
                if secs < left_secs:
                    return False
                if task.name not in self._given_up:
                    self._given_up.add(task.name)
                    left, secs = '; '.join(task.left()), self._options.exit_wait_secs
                    self._log.warning(f'{task.name}: not finished within exit_wait_secs={secs:g} s: {left}')
        return True

    def wait_on_all_ranks(self, collective: Collective) -> None:
        """Wait for the tasks of all ranks. Runs on: all ranks.

        Ranks wait for each other on gloo, since an NCCL collective may follow training, and a short time at a time, so
        that signals are handled.

        Raises:
            SharedError: A rank failed, or did not take part.
        """
        while collective.vote_any(not self.wait(_WAIT_SECS), 'finish'):
            pass

    def wait_before_exit(self) -> None:
        """Wait for the tasks that must finish: the process may be about to end, or goes on."""
        if not self.is_of_this_process:
            return
        try:
            while not self.wait(_SHOW_SECS, for_all=False):
                for target in self._targets:
                    target.lock.show_progress()
        except BaseException:  # Ctrl-C, too
            for task in self._tasks:
                if task.must_finish and (left := task.left()):
                    self._log.warning(f'{task.name}: no longer waited for: {"; ".join(left)}')
            raise

    def close(self, *, process_ends: bool = False) -> None:
        """Wait, unlock the folders, destroy process groups. Needs no other rank. Does nothing the second time.

        Args:
            process_ends: Wait for nothing longer than ``exit_wait_secs``. If time runs out, folders stay locked until
                the process has ended. Process groups end with it.
        """
        if not self.is_of_this_process:
            return
        with self._closing:  # the next run waits here for one that the garbage collector closes
            if self not in RunEnd._open:  # another process may have the folder by now
                return
            self.is_closed = self.is_closed or not process_ends
            for task in self._tasks:
                if not task.must_finish:
                    task.close()
            self.wait_before_exit()
            for task in self._tasks:
                task.close()
            awaited = [task for task in self._tasks if task.must_finish]
            if not process_ends:
                for task in awaited:
                    task.wait()  # however long: the folder stays locked until a save that is being written ends
                if self.requests is not None:
                    self.requests.close()
                if self._children is not None:
                    self._children.close()
                self.signals.remove(self)
            if not any(task.left() for task in awaited):
                for target in self._targets:
                    RunEnd._written.setdefault(target.path, set()).update(target.manifest_checksums)
                    target.unlock()
            if self in RunEnd._open and not process_ends:
                RunEnd._open.remove(self)
                self._last.close()

    def close_in_thread(self) -> None:
        """Called by the garbage collector, which must not wait, when the run is garbage."""

        def close() -> None:
            self.close()
            self.signals.answer(self)

        if self.is_of_this_process:
            threading.Thread(target=close, name='xhf-close', daemon=True).start()

    def closed_error(self) -> TargetError:
        """The error of a save after the run was closed: its folders may belong to the next run by now."""
        return TargetError(
            f'{min(self._places)}: this run was closed, by close() or because another run in this process began with '
            f'the same folder or save_on_signal, so it can save no more; give one of them another out_dir or signal'
        )

    @classmethod
    def require_no_other_writer(cls, target: CheckpointFolder) -> None:
        """Check that no other process has saved there since a run of this one: they would replace each other's saves.

        Calls of ``save_hf`` ask this: they lock the folder only while they save, so that a launcher may go on where a
        notebook began. Runs on: rank 0.

        Raises:
            TargetError: One has.
        """
        written, newest = cls._written.get(target.path), target.newest_manifest()
        if written and newest is not None and crc32(newest) not in written:
            raise TargetError(
                f'{target.path}: another process has saved here since this one did, and a save would replace its save; '
                f'give one of them another out_dir, or move that save away'
            )

    @classmethod
    def is_ambiguous(cls, folder: Path) -> bool:
        """Whether another open run saves to a folder of the same name."""
        return sum(Path(place).name == folder.name for place in {p for end in cls._open for p in end._places}) > 1
