"""What works beside training in one run, what requests saves, and how the run may end.

Saves in the background, uploads and commands of ``on_saved`` log their outcomes themselves, with their steps, in their
own threads; so an end only has to wait for them, for up to ``exit_wait_secs``.

=======================================  =============================================================================
training ends                            :meth:`.Run.finish`: all ranks wait for all background tasks
then; ``close()`` of hook or callback;   :meth:`.Run.close`: this rank waits for saves and uploads, ends
the next run of this process             commands, unlocks folders and destroys process groups
the interpreter exits, whatever ended    :meth:`.BackgroundTasks.close`: this rank waits for saves and uploads, ends
training (Ctrl-C and sys.exit, too)      commands; before other exit handlers (:class:`.ExitWait`)
SIGTERM, SIGHUP, SIGXCPU                 the same in a thread, while training pauses at the end of its iteration; then
                                         the process ends; if the user handles the signal,
                                         :meth:`.BackgroundTasks.wait_before_exit`, then the user's handler
a signal of ``save_on_signal``           a save; then the process ends as in the row above (after SIGUSR1 and SIGUSR2
                                         training goes on)
garbage collection of the run            folders are unlocked, commands end; uploads go on, and exit waits for them
a forked child ends                      nothing: its parent goes on
``os._exit``, SIGKILL, other signals     nothing can be logged; what was committed is whole
=======================================  =============================================================================
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from logging import LoggerAdapter

from xhf_hooks.background.background_tasks import BackgroundTasks
from xhf_hooks.background.exit_wait import ExitWait
from xhf_hooks.background.on_saved import OnSaved
from xhf_hooks.background.save_in_flight import SavesInBackground
from xhf_hooks.background.save_on_signal import SaveRequests
from xhf_hooks.background.upload import Uploads, start_uploads
from xhf_hooks.collective import Collective
from xhf_hooks.options import CallOptions, RunOptions, require_uploads_apart
from xhf_hooks.places.checkpoint_folder import CheckpointFolder

#: While ranks wait for each other's background tasks, they vote this often. Signals are handled between two votes.
_WAIT_SECS = 5.0


class BackgroundWork:
    """The background tasks of one run, its save requests, and its wait at exit. Runs on: all ranks, every method.

    Attributes:
        tasks: The save in flight, uploads, and on rank 0 the command of ``on_saved``.
        uploads: None without ``upload_to``.
        on_saved: None without ``on_saved``, and on other ranks than rank 0.
        requests: None if neither a signal nor the clock can request a save.
    """

    def __init__(self, options: RunOptions | CallOptions, log: LoggerAdapter) -> None:
        self._options = options
        self._log = log
        self.tasks = BackgroundTasks(log, options.exit_wait_secs)
        self.uploads: Uploads | None = None
        self.on_saved: OnSaved | None = None
        self.requests: SaveRequests | None = None
        self._exit_wait: ExitWait | None = None

    def start_tasks(
        self,
        saves: SavesInBackground | None,
        targets: Sequence[CheckpointFolder],
        collective: Collective,
        timestamp: str | None,
    ) -> None:
        """Start the threads of the background tasks.

        Args:
            saves: Makes the saves in the background, if they are made there.
            targets: The folders of saves; the first is that of the newest save.
            timestamp: When the run began, for the name of its uploads; None: it begins now.

        Raises:
            AgreedError: An upload or a command cannot work.
        """
        options = self._options
        if saves is not None:
            self.tasks.all.append(saves)
        if options.upload_to is not None:
            paths = [target.path for target in targets]
            with collective.stage('preflight'):
                require_uploads_apart(options.upload_to, paths[0])
            self.uploads = start_uploads(
                options.upload_to,
                options.storage_options,
                options.upload_keep,
                paths,
                collective,
                self._log,
                timestamp=timestamp,
                keep_every=options.keep_every,
            )
            self.tasks.all.append(self.uploads)
        with collective.stage('preflight'):
            if options.on_saved is not None and collective.rank == 0:
                self.on_saved = OnSaved(options.on_saved, self._log).start()
                self.tasks.all.append(self.on_saved)

    def handle_exits_and_signals(self, owner: object, ending: ExitStack) -> None:
        """From now on, wait for the background tasks before the process ends, and listen to save requests.

        Args:
            owner: When it is garbage, signals request no saves any more.
            ending: Undoes this.
        """
        if self.tasks.all:
            self._exit_wait = ExitWait.start(self.tasks.close, self.tasks.wait_before_exit)
            ending.callback(self._exit_wait.close)
        options = self._options
        if options.save_on_signal or options.interval_minutes is not None:
            interval_secs = None if options.interval_minutes is None else 60 * options.interval_minutes
            self.requests = SaveRequests.start(self._log, options.save_on_signal or (), interval_secs)
            ending.callback(self.requests.close)
            weakref.finalize(owner, self.requests.close).atexit = False

    def wait_on_all_ranks(self, targets: Sequence[CheckpointFolder], collective: Collective) -> None:
        """Wait for deletions and for the background tasks of all ranks. Runs on: all ranks.

        Ranks wait for each other on gloo, since an NCCL collective may follow training, and a short time at a time, so
        that signals are handled.

        Raises:
            SharedError: A rank failed, or did not take part.
        """
        with collective.stage('finish'):
            for target in targets:
                target.siblings.deletion.wait()
        # Without these options, the same on all ranks, no work outlasts a save
        has_work = self._options.upload_to is not None or self._options.on_saved is not None
        while has_work and collective.any(not self.tasks.wait(_WAIT_SECS), 'finish'):
            pass

    def block_if_process_is_ending(self) -> None:
        """If a signal has come that ends the process after the background tasks, go no further in training.

        Returns only if none has come, or if the user handles that signal and lets training go on.
        """
        if self._exit_wait is not None:
            self._exit_wait.block_if_process_is_ending()

    def end_process_if_signaled(self) -> None:
        """Let a signal that requested a save, and ends the process, take effect, once tasks that must finish have.

        :meth:`.SaveRequests.end_process_if_signaled` does so without waiting. Runs on: the main thread.
        """
        if self.requests is None or self.requests.ending_signal is None:
            return
        if self._exit_wait is not None:
            self._exit_wait.finish_work_before(self.requests.ending_signal)
        self.requests.end_process_if_signaled()


def close_forgotten_run(process: int, targets: Sequence[CheckpointFolder], tasks: BackgroundTasks) -> None:
    """Called by the garbage collector for a run that was not closed; returns at once.

    Args:
        process: The process of the run; in a forked child, nothing happens.
        targets: Are unlocked.
        tasks: Are closed.
    """
    if os.getpid() == process:
        for end in (*(target.unlock for target in targets), tasks.close):
            threading.Thread(target=end, daemon=True).start()
