"""What follows each commit: uploads on all ranks, and the command of ``on_saved`` on rank 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from logging import LoggerAdapter
from pathlib import Path

from xhf_hooks.options import CallOptions, RunOptions, require_uploads_apart
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import Step
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.ends.each_save import EachSave
from xhf_hooks.runs.ends.on_saved import OnSaved
from xhf_hooks.runs.ends.upload import Uploads, start_uploads


class AfterSaves:
    """The tasks that work on each committed save of one run.

    Attributes:
        uploads: None without ``upload_to``.
        results: What the command of ``on_saved`` printed (:attr:`.OnSaved.results`). The reader removes them.
    """

    def __init__(self, options: RunOptions | CallOptions, log: LoggerAdapter) -> None:
        self.uploads: Uploads | None = None
        self.results: deque[tuple[Step, Mapping[str, float]]] = deque()
        self._on_saved: OnSaved | None = None
        self._options, self._log = options, log

    def start(self, paths: Sequence[Path], collective: Collective, timestamp: str | None) -> list[EachSave]:
        """Start the threads; returns the tasks. Runs on: all ranks.

        Args:
            paths: The folders of saves; the first is that of the newest save.
            timestamp: When the run began, for the name of its uploads; None: it begins now.

        Raises:
            AgreedError: An upload or a command cannot work.
        """
        options, tasks = self._options, list[EachSave]()
        if options.upload_to is not None:
            with collective.stage('preflight of upload_to'):
                require_uploads_apart(options.upload_to, paths[0])
            self.uploads = start_uploads(options, paths, collective, self._log, timestamp)
            tasks.append(self.uploads)
        with collective.stage('preflight of on_saved'):
            if options.on_saved is not None and collective.rank == 0:
                self._on_saved = OnSaved(options.on_saved, self._log).start()
                self.results = self._on_saved.results
                tasks.append(self._on_saved)
        return tasks

    def handle_commit(self, target: CheckpointFolder, step: Step, collective: Collective) -> None:
        """Called on all ranks after each commit, in the thread that saves, before the next save to that target begins.

        Raises:
            SharedError: A rank failed, or did not take part.
        """
        if self.uploads is not None:
            self.uploads.handle_commit(target, step, collective)
        if self._on_saved is not None:
            self._on_saved.handle_commit(target, step)
