"""``upload_to``: ranks share the upload of each committed save, in the background."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from xhf_hooks.collective import Collective
from xhf_hooks.errors import StoreError
from xhf_hooks.format.text import counted, size_text
from xhf_hooks.integrity.manifest import MANIFEST_NAME, Manifest, parse_manifest
from xhf_hooks.places.kept_folder import KeptFolder, new_name
from xhf_hooks.places.objects import open_store
from xhf_hooks.places.store import StoredSaves, read_pointer, send_file
from xhf_hooks.places.target import SaveTarget
from xhf_hooks.planning.types import Step
from xhf_hooks.telemetry import RunLog
from xhf_hooks.threads import lower_priority
from xhf_hooks.writers.choose import is_shared

if TYPE_CHECKING:
    from xhf_hooks.places.hub import HubDestination

    #: They have the same methods.
    Destination: TypeAlias = 'StoreDestination | HubDestination'

#: Seconds between looks at the store for what other ranks do.
_LEAST_POLL_SECS, _MOST_POLL_SECS = 0.1, 2.0
#: How long the end of the run waits for the thread to notice it.
_END_SECS = 5.0


class Cancelled(Exception):
    """The run has ended before the upload."""


@dataclass(eq=False)
class UploadJob:
    """What this rank does for the upload of one save.

    Attributes:
        number: Number of the save, the same on all ranks; later saves have larger numbers.
        name: Name of its folder, such as ``hf_model``.
        folder: Holds its files until everything is uploaded.
        run: The id of the run in the pointer, by which other ranks than rank 0 find the save in the store.
        n_ranks: Number of ranks that share the files.
        kept: On rank 0, the kept folder to release at the end.
        has_ended: Set when the run has ended.
    """

    number: int
    name: str
    step: Step
    folder: Path
    run: str
    rank: int
    n_ranks: int
    kept: KeptFolder | None = field(default=None, repr=False)
    has_ended: threading.Event = field(default_factory=threading.Event, repr=False)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the save, read by the upload thread."""
        return parse_manifest((self.folder / MANIFEST_NAME).read_bytes(), str(self.folder))

    def pause(self, secs: float = 0.0) -> None:
        """Wait.

        Raises:
            Cancelled: The run has ended.
        """
        if self.has_ended.wait(secs):
            raise Cancelled


class StoreDestination(StoredSaves):
    """Uploads saves of one name to a store. Methods raise StoreError if a request fails.

    Rank 0 waits for no other rank: it looks in the store for what others have uploaded, and uploads what does not
    arrive itself, as that rank may have died or may not reach the store.

    Attributes:
        patience_secs: How long ranks wait for each other, or as long as their own files took if that is longer.
    """

    takes_from_all_ranks = True
    patience_secs = 30.0

    @property
    def where(self) -> str:
        """Its URL."""
        return self.store.url

    def connect(self) -> None:
        """Check before training that uploads will work. Runs on: other ranks than rank 0."""
        self.store.require_usable()

    def upload(self, job: UploadJob) -> str:
        """Upload a rank's share of a save; rank 0 then makes the save visible. Returns its name there."""
        files = job.manifest.files
        share = sorted(files, key=lambda name: (-files[name].nbytes, name))[job.rank :: job.n_ranks]
        began = time.monotonic()
        if job.rank != 0:
            prefix = self._find(job)
            if prefix is not None:
                self._send(job, prefix, share)
            return prefix or ''
        prefix = self.begin(job.step.label, files, job.number)
        self._send(job, prefix, share)
        own_secs = time.monotonic() - began
        deadline, n_taken_over = time.monotonic() + max(self.patience_secs, own_secs), 0
        while missing := self.missing(prefix, files):
            if time.monotonic() < deadline:
                job.pause(min(max(own_secs / 20, _LEAST_POLL_SECS), _MOST_POLL_SECS))
            else:
                n_taken_over += 1
                self._send(job, prefix, missing[-1:])
        self.publish(prefix, (job.folder / MANIFEST_NAME).read_bytes())
        if n_taken_over:
            self._warn(f'uploaded {counted(n_taken_over, "file")} in place of other ranks')
        try:
            self.clean()
        except StoreError as error:
            self._warn(f'older saves were not all deleted: {error}')
        return prefix

    def _find(self, job: UploadJob) -> str | None:
        """Wait until rank 0 has begun the save; None if it is over."""
        deadline = time.monotonic() + self.patience_secs
        while time.monotonic() < deadline:
            pointer = read_pointer(self.store, self.name)
            if pointer is not None and pointer.run == job.run and pointer.number >= job.number:
                return pointer.writing if pointer.number == job.number else None
            job.pause(5 * _LEAST_POLL_SECS)
        return None

    def _send(self, job: UploadJob, prefix: str, names: Sequence[str]) -> None:
        for name in names:
            job.pause()
            send_file(self.store, prefix, name, job.folder / name, job.manifest.files[name])


def uploads_of_run(
    url: str | None,
    backend_args: Mapping[str, Any] | None,
    max_keep: int,
    finals: Sequence[Path],
    collective: Collective,
    log: RunLog,
) -> RunUploads | None:
    """The uploads to a URL; None without one. Runs on: all ranks.

    Args:
        max_keep: How many uploaded saves to keep of those that are not the best.
        finals: The folders of saves; the first is that of the newest save.

    Raises:
        AgreedError: The place cannot be opened.
    """
    from xhf_hooks.places.hub import PREFIX, HubDestination

    if url is None:
        return None
    seen_by_all = is_shared(new_name(finals[0], 'shared'), collective)
    destinations: dict[str, Destination] = {}
    with collective.stage('preflight'):
        for final in finals:
            is_first = final == finals[0]
            if url.startswith(PREFIX):
                destinations[final.name] = HubDestination(url, final.name, is_first=is_first, warn=log.warning)
                continue
            store = open_store(url, backend_args, warn=log.warning)
            destinations[final.name] = StoreDestination(store, final.name, max_keep if is_first else 1, log.warning)
    return RunUploads(destinations, log, is_shared=seen_by_all)


class RunUploads:
    """The uploads of a run, one after the other in a thread of low priority. Every method runs on all ranks.

    A save that is being uploaded goes on when a newer one arrives; one that waits is replaced.

    Args:
        destinations: Name of a save's folder to its destination.
        is_shared: Whether all ranks see the folders.

    Attributes:
        uploaded: Names of published saves.
        failed: Names and steps of the others.
    """

    name, must_finish = 'uploads', True

    def __init__(self, destinations: Mapping[str, Destination], log: RunLog, *, is_shared: bool) -> None:
        self.uploaded: list[str] = []
        self.failed: list[str] = []
        self._destinations, self._log, self._is_shared = destinations, log, is_shared
        self._thread: threading.Thread | None = None
        self._process, self._number, self._rank = os.getpid(), 0, 0
        self._jobs: list[UploadJob] = []  # the first is being uploaded
        self._changed = threading.Condition()
        self._has_ended = threading.Event()

    def claim(self, rank: int) -> None:
        """Check before training that uploads will work.

        Raises:
            StoreError: They will not. Ranks have not agreed on this error.
        """
        self._rank = rank
        for number, destination in enumerate(self._destinations.values()):
            if rank == 0:
                destination.claim()
            elif number == 0 and self._is_shared and destination.takes_from_all_ranks:
                destination.connect()
        self._thread = threading.Thread(target=self._run, name='xhf-upload', daemon=True)
        self._thread.start()

    def newest(self, name: str) -> tuple[bytes | None, str]:
        """Manifest and URL of the newest save of that name there, if any. Runs on: rank 0.

        Raises:
            StoreError: The store cannot be read.
        """
        destination = self._destinations[name]
        return destination.newest_manifest(), f'{destination.where}/{name}'

    def committed(self, target: SaveTarget, step: Step, collective: Collective) -> None:
        """Begin the upload of a committed save, in the thread that saves. Errors are logged.

        Raises:
            RankLostError: A rank did not take part.
        """
        final, offer, kept = target.final, None, None
        destination = self._destinations[final.name]
        if collective.rank == 0:
            try:
                kept = KeptFolder.keep(final)
                offer = kept.path.name, destination.run
            except Exception as error:  # the save itself is good
                self._log.error(f'the save of {step.label} will not be uploaded: {error}')
        offer = collective.broadcast(offer)
        self._number += 1
        n_ranks = collective.world_size if self._is_shared and destination.takes_from_all_ranks else 1
        if offer is not None and collective.rank < n_ranks:
            folder = final.with_name(offer[0])  # other hosts may mount it elsewhere
            rank, run = collective.rank, offer[1]
            self.add(UploadJob(self._number, final.name, step, folder, run, rank, n_ranks, kept, self._has_ended))

    def add(self, job: UploadJob) -> None:
        """Queue a save, on rank 0 in place of one of that name that waits: other ranks do what the pointer says."""
        with self._changed:
            for other in [other for other in self._jobs[1:] if other.name == job.name and job.rank == 0]:
                self._jobs.remove(other)
                self._tell(other, logging.WARNING, 'was cancelled: there is a newer save')
                self._end_job(other)
            self._jobs.append(job)
            self._changed.notify_all()

    def look(self) -> None:
        """Nothing: uploads have a thread of their own."""

    def wait(self, secs: float) -> bool:
        """Wait until nothing is left to do; returns False if time runs out. Needs no other rank."""
        if self._thread is None or os.getpid() != self._process:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, secs)

    def close(self) -> None:
        """Cancel what is left, log what was not uploaded, release the destinations. Needs no other rank."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._process:
            return
        self._has_ended.set()
        with self._changed:
            self._changed.notify_all()
        thread.join(_END_SECS)
        for job in [*self._jobs]:  # the store does not answer
            self._end_job(job)
        if self._rank != 0:
            return
        if self.failed:
            done = ', '.join(self.uploaded) or 'none'
            self._log.warning(f'not uploaded: {"; ".join(self.failed)}. Uploaded: {done}')
        if not thread.is_alive():
            for destination in self._destinations.values():
                destination.release()

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._has_ended.is_set())
                if not self._jobs:
                    return
                job = self._jobs[0]
            done = self._upload(job)
            with self._changed:
                self._end_job(job, done)
                self._jobs.remove(job)
                self._changed.notify_all()

    def _upload(self, job: UploadJob) -> str | None:
        """Returns the name of the save there, or None."""
        began = time.monotonic()
        try:
            job.pause()
            place = self._destinations[job.name].upload(job)
        except Cancelled:
            self._tell(job, logging.WARNING, 'was cancelled: the run has ended')
        except Exception as error:
            self._tell(job, logging.ERROR, f'failed: {type(error).__name__}: {error}')
        else:
            nbytes = sum(file.nbytes for file in job.manifest.files.values())
            took = f'{size_text(nbytes)} in {time.monotonic() - began:.1f} s'
            if job.rank == 0:
                self._log.info(f'uploaded {job.step.label} to {self._destinations[job.name].where}/{place}: {took}')
            return place
        return None

    def _tell(self, job: UploadJob, level: int, what: str) -> None:
        if job.rank == 0:
            self._log.log(level, f'the upload of {job.step.label} to {self._destinations[job.name].where} {what}')

    def _end_job(self, job: UploadJob, place: str | None = None) -> None:
        if job.kept is not None:
            job.kept.release()
        if place is None:
            self.failed.append(f'{job.name}, {job.step.label}')
        else:
            self.uploaded.append(place)
