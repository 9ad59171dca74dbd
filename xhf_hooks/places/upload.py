"""``upload_to``: ranks share the upload of each committed save, in the background."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from xhf_hooks.collective import Collective
from xhf_hooks.errors import DamagedError, StoreError
from xhf_hooks.format.text import counted, size_text
from xhf_hooks.integrity.manifest import MANIFEST_NAME, Manifest, read_manifest
from xhf_hooks.places.kept_folder import KeptFolder, new_name
from xhf_hooks.places.objects import Store, open_store
from xhf_hooks.places.store import StoredSaves, read_pointer, send_file
from xhf_hooks.planning.types import Step
from xhf_hooks.telemetry import RunLog
from xhf_hooks.threads import lower_priority
from xhf_hooks.writers.choose import is_shared

#: Seconds between looks at the store for what other ranks do.
_LEAST_POLL_SECS, _MOST_POLL_SECS = 0.1, 2.0
#: How long the end of the run waits for the thread to notice it, and for old saves to be deleted.
_END_SECS = 5.0


class Unwanted(Exception):
    """The upload of this save was cancelled while it was in progress."""


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
    """

    number: int
    name: str
    step: Step
    folder: Path
    run: str
    rank: int
    n_ranks: int
    kept: KeptFolder | None = field(default=None, repr=False)
    is_wanted: bool = True

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the save, read by the upload thread."""
        found = read_manifest(self.folder)
        if found is None:
            raise DamagedError(f'{self.folder}: {MANIFEST_NAME} is missing from the folder that is kept for the upload')
        return found

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.manifest.files.values())


class Destination(Protocol):
    """Where saves of one name are uploaded. Methods raise StoreError if a request fails."""

    where: str
    run: str
    #: Whether ranks share the files of a save.
    takes_from_all_ranks: bool

    def claim(self) -> None:
        """Check before training that uploads will work. Runs on: rank 0."""

    def require_usable(self) -> None:
        """Check before training that uploads will work. Runs on: other ranks that upload."""

    def newest_manifest(self) -> bytes | None:
        """The manifest of the newest save there. Runs on: rank 0."""

    def upload(self, job: UploadJob) -> str:
        """Upload a rank's share of a save; rank 0 then makes the save visible. Returns its name there."""

    def release(self) -> None:
        """At the end of the run, delete what is due. Runs on: rank 0."""


class StoreDestination:
    """A :class:`Destination` under a URL.

    Rank 0 waits for no other rank: it looks in the store for what others have uploaded, and uploads what does not
    arrive itself, as that rank may have died or may not reach the store.

    Args:
        max_keep: How many uploaded saves to keep; -1 keeps all.

    Attributes:
        patience_secs: How long ranks wait for each other, or as long as their own files took if that is longer.
    """

    takes_from_all_ranks = True
    patience_secs = 30.0

    def __init__(self, store: Store, name: str, max_keep: int, log: RunLog) -> None:
        self._store, self._name, self._log = store, name, log
        self._saves = StoredSaves(store, name, max_keep)
        self.where, self.run = store.url, self._saves.run

    def claim(self) -> None:
        self._saves.claim()
        self._tell()

    def require_usable(self) -> None:
        self._store.require_usable()

    def newest_manifest(self) -> bytes | None:
        return self._saves.newest_manifest()

    def upload(self, job: UploadJob) -> str:
        files = job.manifest.files
        share = share_out({name: file.nbytes for name, file in files.items()}, job.n_ranks)[job.rank]
        began = time.monotonic()
        if job.rank != 0:
            prefix = self._find(job)
            if prefix is not None:
                self._send(job, prefix, share)
            return prefix or ''
        prefix = self._saves.begin(job.step.label, files, job.number)
        self._send(job, prefix, share)
        own_secs = time.monotonic() - began
        deadline, n_taken_over = time.monotonic() + max(self.patience_secs, own_secs), 0
        while missing := self._missing(job, prefix):
            if time.monotonic() < deadline:
                _pause(job, min(max(own_secs / 20, _LEAST_POLL_SECS), _MOST_POLL_SECS))
            else:
                n_taken_over += 1
                self._send(job, prefix, missing[-1:])
        self._saves.publish(prefix, (job.folder / MANIFEST_NAME).read_bytes(), job.step)
        if n_taken_over:
            self._log.warning(f'uploaded {counted(n_taken_over, "file")} in place of other ranks')
        try:
            self._saves.clean()
        except StoreError as error:
            self._log.warning(f'older saves were not all deleted: {error}')
        self._tell()
        return prefix

    def release(self) -> None:
        self._saves.release()

    def _find(self, job: UploadJob) -> str | None:
        """Wait until rank 0 has begun the save; None if it is over."""
        deadline = time.monotonic() + self.patience_secs
        while time.monotonic() < deadline:
            pointer = read_pointer(self._store, self._name)
            if pointer is not None and pointer.run == job.run and pointer.number >= job.number:
                return pointer.writing if pointer.number == job.number else None
            _pause(job, 5 * _LEAST_POLL_SECS)
        return None

    def _send(self, job: UploadJob, prefix: str, names: Sequence[str]) -> None:
        for name in names:
            if not job.is_wanted:
                raise Unwanted
            send_file(self._store, prefix, name, job.folder / name, job.manifest.files[name])

    def _missing(self, job: UploadJob, prefix: str) -> list[str]:
        sizes = self._store.sizes(prefix)
        return [name for name, file in job.manifest.files.items() if sizes.get(name) != file.nbytes]

    def _tell(self) -> None:
        for warning in self._saves.warnings:
            self._log.warning(warning)
        self._saves.warnings = []


def _pause(job: UploadJob, secs: float) -> None:
    time.sleep(secs)
    if not job.is_wanted:
        raise Unwanted


def share_out(files: Mapping[str, int], n_ranks: int) -> list[list[str]]:
    """The names of the files that each rank uploads, balanced by size. The same on every rank.

    Args:
        files: Name to size in bytes.
    """
    shares: list[list[str]] = [[] for _ in range(n_ranks)]
    nbytes = [0] * n_ranks
    for name in sorted(files, key=lambda name: (-files[name], name)):
        rank = min(range(n_ranks), key=lambda rank: (nbytes[rank], len(shares[rank]), rank))
        shares[rank].append(name)
        nbytes[rank] += files[name]
    return shares


class UploadThread:
    """Uploads one save after the other, at low priority, until :meth:`end`; training adds and cancels jobs.

    Attributes:
        uploaded: Names of published saves.
        failed: Steps of the others.
    """

    def __init__(self, destinations: Mapping[str, Destination], log: RunLog) -> None:
        self.uploaded: list[str] = []
        self.failed: list[str] = []
        self._destinations, self._log = destinations, log
        self._jobs: deque[UploadJob] = deque()  # the first is being uploaded
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name='xhf-upload', daemon=True)
        self._thread.start()

    def still_wanted(self, name: str) -> list[int]:
        """Numbers of the saves whose upload goes on when a newer one of that name arrives: not those that wait."""
        with self._changed:
            return [job.number for place, job in enumerate(self._jobs) if job.name != name or place == 0]

    def add(self, job: UploadJob, still_wanted: Collection[int]) -> None:
        """Queue a save and cancel all others except ``still_wanted``."""
        with self._changed:
            for other in self._jobs:
                other.is_wanted = other.is_wanted and other.number in still_wanted
            self._jobs.append(job)
            self._changed.notify_all()

    def wait(self, timeout_secs: float) -> bool:
        """Wait until nothing is left to do; returns False if time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_secs)

    def end(self) -> bool:
        """Cancel the remaining jobs and end the thread; returns False if it hangs, as the store does not answer."""
        with self._changed:
            self._ending = True
            for job in self._jobs:
                job.is_wanted = False
            self._changed.notify_all()
        self._thread.join(timeout=_END_SECS)
        with self._changed:
            for job in self._jobs:
                self._end_job(job, None)
            return not self._jobs

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._ending)
                if not self._jobs:
                    return
                job = self._jobs[0]
            done = self._upload(job)
            with self._changed:
                self._end_job(job, done)
                self._jobs.popleft()
                self._changed.notify_all()

    def _upload(self, job: UploadJob) -> str | None:
        """Returns the name of the save there, or None."""
        began, where = time.monotonic(), self._destinations[job.name].where
        what = f'the upload of {job.step.label} to {where}'
        try:
            if not job.is_wanted:
                raise Unwanted
            place = self._destinations[job.name].upload(job)
        except Unwanted:
            why = 'the run has ended' if self._ending else 'there is a newer save'
            self._tell(job, logging.WARNING, f'{what} was cancelled: {why}')
        except Exception as error:
            self._tell(job, logging.ERROR, f'{what} failed: {type(error).__name__}: {error}')
        else:
            secs = time.monotonic() - began
            self._tell(
                job,
                logging.INFO,
                f'uploaded {job.step.label} to {where}/{place}: {size_text(job.nbytes)} in {secs:.1f} s',
            )
            return place
        return None

    def _tell(self, job: UploadJob, level: int, text: str) -> None:
        if job.rank == 0:
            self._log.log(level, text)

    def _end_job(self, job: UploadJob, done: str | None) -> None:
        if job.kept is not None:
            job.kept.release()
        if done is None:
            self.failed.append(f'{job.name}, {job.step.label}')
        else:
            self.uploaded.append(done)


def uploads_of_run(
    url: str | None,
    backend_args: Mapping[str, Any] | None,
    max_keep: int,
    finals: Sequence[Path],
    collective: Collective,
    log: RunLog,
    *,
    wait_secs: float,
) -> RunUploads | None:
    """The uploads to a URL; None without one. Runs on: all ranks.

    Args:
        max_keep: How many uploaded saves to keep of those that are not the best.
        finals: The folders of saves; the first is that of the newest save.
        wait_secs: How long the end of the run waits for uploads.

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
            destinations[final.name] = StoreDestination(store, final.name, max_keep if is_first else 1, log)
    return RunUploads(destinations, log, wait_secs=wait_secs, is_shared=seen_by_all)


class RunUploads:
    """The uploads of a run. Every method runs on all ranks.

    Args:
        destinations: Name of a save's folder to its destination.
        wait_secs: How long the end of the run waits for uploads.
        is_shared: Whether all ranks see the folders.
    """

    def __init__(
        self, destinations: Mapping[str, Destination], log: RunLog, *, wait_secs: float, is_shared: bool
    ) -> None:
        self._destinations, self._log, self._is_shared = destinations, log, is_shared
        self._wait_secs = wait_secs
        self._deadline: float | None = None
        self._thread: UploadThread | None = None
        self._process, self._number = os.getpid(), 0
        self._is_first = False

    def claim(self, rank: int) -> None:
        """Check before training that uploads will work.

        Raises:
            StoreError: They will not. Ranks have not agreed on this error.
        """
        self._is_first = rank == 0
        for number, destination in enumerate(self._destinations.values()):
            if rank == 0:
                destination.claim()
            elif number == 0 and self._is_shared and destination.takes_from_all_ranks:
                destination.require_usable()
        self._thread = UploadThread(self._destinations, self._log)

    def newest_manifests(self) -> list[tuple[str, bytes]]:
        """URL and manifest of the newest save of each name but the first, which is not a best one. Runs on: rank 0.

        Raises:
            StoreError: The store cannot be read.
        """
        found = [(f'{each.where}/{name}', each.newest_manifest()) for name, each in [*self._destinations.items()][1:]]
        return [(url, manifest) for url, manifest in found if manifest]

    def offer(self, final: Path, step: Step, collective: Collective) -> None:
        """Begin the upload of a committed save. Runs on: all ranks, in the thread that saves.

        Errors are logged.

        Raises:
            RankLostError: A rank did not take part.
        """
        destination, offer, kept = self._destinations[final.name], None, None
        if collective.rank == 0:
            try:
                kept = KeptFolder.keep(final)
                for_all = self._is_shared and kept.is_linked and destination.takes_from_all_ranks
                offer = kept.path.name, for_all, destination.run, self._thread.still_wanted(final.name)
            except Exception as error:  # the save itself is good
                self._log.error(f'the save of {step.label} will not be uploaded: {error}')
        offer = collective.broadcast(offer)
        self._number += 1
        if offer is None:
            return
        folder, for_all, run, still_wanted = offer
        n_ranks = collective.world_size if for_all else 1
        place = final.with_name(folder)  # other hosts may mount it elsewhere
        job = UploadJob(self._number, final.name, step, place, run, collective.rank, n_ranks, kept)
        job.is_wanted = collective.rank < n_ranks
        self._thread.add(job, still_wanted)

    def wait(self) -> None:
        """Wait for uploads in progress, up to ``exit_wait_secs`` in all. Needs no other rank."""
        thread = self._thread
        if thread is None or os.getpid() != self._process or thread.wait(0):
            return
        if self._deadline is None:
            self._log.info('waiting for uploads')
            self._deadline = time.monotonic() + self._wait_secs
        if thread.wait(max(0.0, self._deadline - time.monotonic())):
            self._deadline = None
        elif self._is_first:
            self._log.error(f'uploads did not finish within exit_wait_secs={self._wait_secs:g} s')

    def end(self) -> None:
        """Wait for uploads, log what was not uploaded, release the destinations. Needs no other rank."""
        self.wait()
        self._give_up()

    def end_forgotten(self) -> None:
        """Cancel uploads of a run that was garbage-collected without being closed. Returns at once."""
        threading.Thread(target=self._give_up, name='xhf-upload-end', daemon=True).start()

    def _give_up(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._process:
            return
        has_ended = thread.end()
        if not self._is_first:
            return
        if thread.failed:
            done = ', '.join(thread.uploaded) or 'none'
            self._log.warning(f'not uploaded: {"; ".join(thread.failed)}. Uploaded: {done}')
        if has_ended:
            releasing = threading.Thread(target=self._release, name='xhf-upload-release', daemon=True)
            releasing.start()
            releasing.join(_END_SECS)  # the next run deletes the rest

    def _release(self) -> None:
        for destination in self._destinations.values():
            destination.release()
