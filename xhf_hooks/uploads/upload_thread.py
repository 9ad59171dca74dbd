"""The thread of a rank that uploads one save after the other and retries after failures."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TypeVar

from xhf_hooks.concurrency.low_priority import lower_priority
from xhf_hooks.errors import StoreError
from xhf_hooks.format.text import counted, size_text
from xhf_hooks.stores.senders import Senders
from xhf_hooks.telemetry.log import RunLog
from xhf_hooks.uploads.file_upload import PARTS_IN_MEMORY, Unwanted
from xhf_hooks.uploads.job import Destination, Means, UploadJob

T = TypeVar('T')
#: Seconds between two attempts, doubled from the first to the second value, with jitter since all ranks start at once.
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 1.0, 60.0
_LOG_SECS = 600.0
#: Seconds between checks of rank 0 for other ranks' files: a twentieth of the time of its own, within these limits.
_LEAST_POLL_SECS, _MOST_POLL_SECS = 0.1, 5.0


class UploadThread:
    """Works in the background at low priority until :meth:`end`; training adds and cancels jobs.

    It waits for no other rank: rank 0 looks in the store for files that others have uploaded. If a file does not
    arrive, since a rank died or cannot reach the store, rank 0 uploads it itself after a while.

    Attributes:
        uploaded: Places of published saves.
        failed: What happened to the other saves, for the log.
        patience_secs: How long rank 0 waits for other ranks' files: this, or the time of its own files if longer.
    """

    patience_secs = 30.0

    def __init__(self, destinations: Mapping[str, Destination], log: RunLog) -> None:
        self.uploaded: list[str] = []
        self.failed: list[str] = []
        self._destinations, self._log = destinations, log
        self._jobs: deque[UploadJob] = deque()  # the first is being uploaded
        self._given_up: list[UploadJob] = []
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._ending = False
        self._senders = Senders(PARTS_IN_MEMORY, lower_priority)
        self._room = threading.Semaphore(PARTS_IN_MEMORY)
        self._thread = threading.Thread(target=self._run, name='xhf-upload', daemon=True)
        self._thread.start()

    def still_wanted(self, name: str) -> list[int]:
        """Numbers of the saves whose upload goes on when a newer one of that name arrives. Runs on: rank 0.

        The newest wins: a waiting upload is cancelled, and so is a running one whose last attempt failed.
        """
        with self._changed:
            return [
                job.number
                for place, job in enumerate(self._jobs)
                if job.is_wanted and (job.name != name or (place == 0 and not job.is_failing))
            ]

    def add(self, job: UploadJob, still_wanted: Collection[int]) -> None:
        """Queue a save and cancel all others except ``still_wanted``."""
        with self._changed:
            for other in self._jobs:
                other.is_wanted = other.is_wanted and other.number in still_wanted
            self._jobs.append(job)
            self._changed.notify_all()
        self._wake.set()

    def wait(self, timeout_secs: float) -> bool:
        """Wait until nothing is left to do; returns False if time ran out."""
        deadline = time.monotonic() + timeout_secs
        with self._changed:
            while self._jobs and self._thread.is_alive() and time.monotonic() < deadline:
                self._changed.wait(min(1.0, max(0.0, deadline - time.monotonic())))
            return not self._jobs

    def end(self) -> None:
        """Cancel the remaining jobs and end the thread."""
        with self._changed:
            self._ending = True
            for job in self._jobs:
                job.is_wanted = False
            self._changed.notify_all()
        self._wake.set()
        self._thread.join(timeout=self.patience_secs)  # it may be waiting for a hanging store

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                while not self._jobs and not self._ending:
                    self._changed.wait()
                if not self._jobs:
                    break
                job = self._jobs[0]
            self._upload_or_tell(job)
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()
        self._senders.close()

    def _upload_or_tell(self, job: UploadJob) -> None:
        what = f'{job.step.label} to {self._destinations[job.name].where}/{job.place}'
        try:
            self._upload(job, what)
        except Unwanted:
            why = 'the run has ended' if self._ending else 'there is a newer save'
            self._not_uploaded(job, f'{what} was cancelled: {why}', logging.WARNING)
        except Exception as error:
            self._not_uploaded(job, f'{what} failed: {type(error).__name__}: {error}')
        finally:
            if job.kept is not None:
                job.kept.release()

    def _not_uploaded(self, job: UploadJob, what: str, level: int = logging.ERROR) -> None:
        if job.rank == 0:
            self.failed.append(what)
            self._given_up.append(job)
            self._log.log(level, f'the upload of {what}')

    def _upload(self, job: UploadJob, what: str) -> None:
        began, destination = time.monotonic(), self._destinations[job.name]
        if not job.is_wanted:
            raise Unwanted
        means = Means(self._senders, self._room, lambda: job.is_wanted)
        self._try(job, what, lambda: destination.send(job, job.share, means))
        if job.rank != 0:
            return
        own_secs, n_taken_over = time.monotonic() - began, 0
        deadline = time.monotonic() + max(self.patience_secs, own_secs)
        poll_secs = min(max(own_secs / 20, _LEAST_POLL_SECS), _MOST_POLL_SECS)
        while missing := self._try(job, what, lambda: destination.missing(job)):
            if time.monotonic() < deadline:
                self._pause(job, poll_secs)
            else:
                n_taken_over += 1
                last = missing[-1:]
                self._try(job, what, partial(destination.send, job, last, means))
        self._try(job, what, lambda: destination.publish(job))
        self.uploaded.append(job.place)
        alone = f', {counted(n_taken_over, "file")} in place of other ranks' if n_taken_over else ''
        self._log.info(f'uploaded {what}: {size_text(job.nbytes)} in {time.monotonic() - began:.1f} s{alone}')
        self._clear_given_up()

    def _try(self, job: UploadJob, what: str, attempt: Callable[[], T]) -> T:
        pause_secs, told = _FIRST_PAUSE_SECS, -_LOG_SECS
        while True:
            try:
                if not job.is_wanted:
                    raise Unwanted
                done = attempt()
                if job.is_failing:
                    job.is_failing = False
                    self._log.info(f'the upload of {what} continues')
                return done
            except OSError as error:  # of the store or of the file system
                job.is_failing = True
                if time.monotonic() - told > _LOG_SECS:
                    told = time.monotonic()
                    self._log.warning(f'the upload of {what} failed and will be retried: {error}')
            self._pause(job, pause_secs * random.uniform(0.5, 1.0))
            pause_secs = min(2 * pause_secs, _LONGEST_PAUSE_SECS)

    def _pause(self, job: UploadJob, secs: float) -> None:
        deadline = time.monotonic() + secs
        while job.is_wanted and (left := deadline - time.monotonic()) > 0:
            self._wake.wait(left)
            self._wake.clear()

    def _clear_given_up(self) -> None:
        """Remove what was uploaded of cancelled saves. By now the store answers and other ranks have stopped."""
        given_up, self._given_up = self._given_up, []
        for job in given_up:
            try:
                self._destinations[job.name].abandon(job)
            except StoreError:  # again after the next save, or by the next run
                self._given_up.append(job)
