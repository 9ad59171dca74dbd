"""What follows each commit: uploads on all ranks, and the command of ``on_saved`` on rank 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
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

    Made by :meth:`start`.

    Attributes:
        uploads: None without ``upload_to``.
        results: What the command of ``on_saved`` printed (:attr:`.OnSaved.results`). The reader removes them.
    """

    def __init__(self, uploads: Uploads | None, on_saved: OnSaved | None) -> None:
        self.uploads, self._on_saved = uploads, on_saved
        self.results: deque[tuple[Step, Mapping[str, float]]] = deque() if on_saved is None else on_saved.results

    @classmethod
    def start(
        cls,
        options: RunOptions | CallOptions,
        paths: Sequence[Path],
        collective: Collective,
        log: LoggerAdapter,
        timestamp: str | None,
        add_task: Callable[[EachSave], None],
    ) -> AfterSaves:
        """Start the threads. Runs on: all ranks.

        Args:
            paths: The folders of saves; the first is that of the newest save.
            timestamp: When the run began, for the name of its uploads; None: it begins now.
            add_task: Called with each task that was started, also if the next one cannot start: an end waits for it,
                and closes it.

        Raises:
            AgreedError: An upload or a command cannot work.
        """
        uploads = on_saved = None
        if options.upload_to is not None:
            with collective.stage('preflight of upload_to'):
                require_uploads_apart(options.upload_to, paths[0])
            uploads = start_uploads(options, paths, collective, log, timestamp)
            add_task(uploads)
        with collective.stage('preflight of on_saved'):
            if options.on_saved is not None and collective.rank == 0:
                on_saved = OnSaved(options.on_saved, log).start()
                add_task(on_saved)
        return cls(uploads, on_saved)

    def handle_commit(self, target: CheckpointFolder, step: Step, collective: Collective) -> None:
        """Called on all ranks after each commit, in the thread that saves, before the next save to that target begins.

        Raises:
            SharedError: A rank failed, or did not take part.
        """
        if self.uploads is not None:
            self.uploads.handle_commit(target, step, collective)
        if self._on_saved is not None:
            self._on_saved.handle_commit(target, step)
