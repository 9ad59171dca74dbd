"""``upload_to``: ranks share the upload of each committed save, in the background."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import LoggerAdapter
from pathlib import Path
from typing import Any

from xhf_hooks.background.each_save import EachSave, SaveJob
from xhf_hooks.collective import Collective
from xhf_hooks.errors import XhfError
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.format.text import counted, size_text
from xhf_hooks.integrity.manifest import Manifest, parse_manifest
from xhf_hooks.places.access import all_ranks_see
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.hub_bucket import is_bucket_url
from xhf_hooks.places.store import Pointer, StoredSaves, read_pointer, run_prefix, send_file
from xhf_hooks.planning.types import Step

#: Seconds between two requests to the store for what other ranks have done.
_LEAST_POLL_SECS, _MOST_POLL_SECS = 0.1, 2.0


@dataclass(eq=False)
class UploadJob(SaveJob):
    """This rank's work for the upload of one save.

    Attributes:
        number: Number of the save, the same on all ranks; later saves have larger numbers.
        folder: Holds its files until everything is uploaded.
    """

    number: int
    folder: Path


class Uploads(EachSave[UploadJob]):
    """The uploads of a run. Public methods run on all ranks.

    Rank 0 waits for no other rank: it lists in the store which files other ranks have uploaded, and uploads missing
    files itself, since their rank may have died or may not reach the store. Other ranks wait until rank 0 begins this
    save, or a later one. A file that they cannot upload is no error: rank 0 uploads it, or logs why it cannot.

    Inherited from :class:`.EachSave`: a thread that calls :meth:`process` with one job after another and logs errors;
    ``add``, which queues a job in ``_waiting``; ``pause``, which raises once ``close`` has set ``_must_end``. Since
    ``must_finish`` is set, an end waits for the uploads even when training was interrupted.

    Args:
        destinations: Where saves are uploaded to, by the name of their folder.
        n_ranks: Number of ranks that share the files.

    Attributes:
        patience_secs: How long rank 0 waits for other ranks, or as long as its own files took if that is longer.
    """

    name, must_finish = 'uploads', True
    what = 'the upload of'
    patience_secs = 30.0

    def __init__(
        self, destinations: Mapping[str, StoredSaves], log: LoggerAdapter, rank: int = 0, n_ranks: int = 1
    ) -> None:
        self._destinations = destinations
        self._rank = rank
        self._n_ranks = n_ranks
        self._number = 0
        self._is_sending = False  # on other ranks than rank 0
        super().__init__(log)

    def prepare(self) -> None:
        """Check before training that uploads will work.

        Raises:
            StoreError: They will not. Other ranks do not know this error.
        """
        for number, destination in enumerate(self._destinations.values()):
            if self._rank == 0:
                destination.create()
            elif number == 0 and self._rank < self._n_ranks:
                destination.store.require_writable()

    def handle_commit(self, target: CheckpointFolder, step: Step, collective: Collective) -> None:
        """Begin the upload of a committed save.

        Raises:
            SharedError: A rank failed, or did not take part.
        """
        with contextlib.ExitStack() as undo:

            def offer() -> str | None:
                pinned = self.pin(target, step)
                if pinned is None:
                    return None
                undo.callback(pinned.unpin)
                return pinned.path.name

            name = collective.from_rank0('upload', offer)
            release = undo.pop_all().close  # on other ranks than rank 0, there is nothing to release
        self._number += 1
        if name is not None and self._rank < self._n_ranks:
            folder = target.path.with_name(name)  # other hosts may mount it elsewhere
            # Only rank 0 skips saves for newer ones; other ranks learn from the pointer which save it has begun
            self.add(UploadJob(target.name, step, release, self._number, folder), replaces=self._rank == 0)

    def process(self, job: UploadJob) -> None:
        """Upload this rank's share of a save; rank 0 then makes the save visible."""
        if self._rank != 0:
            with contextlib.suppress(XhfError, OSError):  # such as the files of a save that rank 0 has skipped
                self._help(job)
            return
        began, destination = time.monotonic(), self._destinations[job.name]
        manifest, data = _manifest_of(job)
        prefix = self._publish(destination, job, manifest, data)
        size = size_text(sum(file.nbytes for file in manifest.files.values()))
        took = f'{size} in {time.monotonic() - began:.1f} s'
        self._log.info(f'uploaded {job.step.label} to {destination.url}/{prefix}: {took}')

    def close(self) -> None:
        """Drop the uploads that are left, log all that were not made, and end the thread."""
        if self._must_end.is_set():
            return
        super().close()
        if self.failed:
            self._log.warning(f'not uploaded: {"; ".join(self.failed)}')
        if self._rank == 0 and not self._thread.is_alive():
            for destination in self._destinations.values():
                destination.clean_at_end()

    def left(self) -> list[str]:
        """The saves on which work is left. Rank 0 may never begin what other ranks wait for."""
        return super().left() if self._rank == 0 or self._is_sending else []

    def _publish(self, saves: StoredSaves, job: UploadJob, manifest: Manifest, data: bytes) -> str:
        """Returns the name of the save there."""
        began, files = time.monotonic(), manifest.files
        prefix = saves.begin(job.step.label, files, job.number)
        self._send(saves, job, prefix, manifest, self._share(manifest))
        own_secs = time.monotonic() - began
        deadline, n_taken_over = time.monotonic() + max(self.patience_secs, own_secs), 0
        while missing := saves.missing(prefix, files):
            if time.monotonic() < deadline:
                self.pause(min(max(own_secs / 20, _LEAST_POLL_SECS), _MOST_POLL_SECS))
            else:
                n_taken_over += 1
                # One file, then look again. The smallest: other ranks send theirs largest first
                smallest = [name for name in _largest_first(manifest) if name in missing][-1:]
                self._send(saves, job, prefix, manifest, smallest)
        saves.publish(prefix, data)
        if n_taken_over:
            self._log.warning(f'uploaded {counted(n_taken_over, "file")} in place of other ranks')
        return prefix

    def _help(self, job: UploadJob) -> None:
        """Upload this rank's files once rank 0 has begun the save, unless that is over."""
        pause_secs = _LEAST_POLL_SECS
        while (pointer := self._begun_since(job)) is None:
            self.pause(pause_secs)  # raises once the run has ended
            pause_secs = min(2 * pause_secs, _MOST_POLL_SECS)
        if pointer.number != job.number or pointer.writing is None:
            return
        self._is_sending = True
        try:
            manifest, _ = _manifest_of(job)
            self._send(self._destinations[job.name], job, pointer.writing, manifest, self._share(manifest))
        finally:
            self._is_sending = False

    def _begun_since(self, job: UploadJob) -> Pointer | None:
        """The pointer, once rank 0 has begun this save or a later one: it takes saves by number, and skips some.

        A later one may be of another folder, such as that of the best save, which has a pointer of its own.
        """
        for name in dict.fromkeys(each.name for each in [job, *self._waiting]):
            pointer = read_pointer(self._destinations[name].store, name)
            if pointer is not None and pointer.number >= job.number:
                return pointer
        return None

    def _drop(self, job: SaveJob, why: str) -> None:
        if self._rank == 0:  # which logs it for all ranks
            super()._drop(job, why)

    def _share(self, manifest: Manifest) -> list[str]:
        return _largest_first(manifest)[self._rank :: self._n_ranks]

    def _send(self, saves: StoredSaves, job: UploadJob, prefix: str, manifest: Manifest, names: Sequence[str]) -> None:
        for name in names:
            self.pause()  # raises once the run has ended
            send_file(saves.store, prefix, name, job.folder / name, manifest.files[name])


def _largest_first(manifest: Manifest) -> list[str]:
    return sorted(manifest.files, key=lambda name: (-manifest.files[name].nbytes, name))


def _manifest_of(job: UploadJob) -> tuple[Manifest, bytes]:
    data = (job.folder / MANIFEST_NAME).read_bytes()
    return parse_manifest(data, str(job.folder)), data


def start_uploads(
    url: str,
    storage_options: Mapping[str, Any] | None,
    max_keep: int,
    finals: Sequence[Path],
    collective: Collective,
    log: LoggerAdapter,
    *,
    timestamp: str | None = None,
    keep_every: int | None = None,
) -> Uploads:
    """Start the thread of the uploads to a URL. Runs on: all ranks.

    Args:
        max_keep: How many uploaded saves to keep of those that are not the best.
        finals: The folders of saves; the first is that of the newest save.
        timestamp: As in :func:`.run_prefix`.
        keep_every: As in :class:`.Retention`, for those that are not the best.

    Raises:
        AgreedError: Rank 0 cannot write next to the first of ``finals``, by which it is tried whether all ranks see it.
    """
    url = f'{url}/{collective.from_rank0("preflight", partial(run_prefix, timestamp))}'
    newest, *extra = (final.name for final in finals)
    destinations = {newest: StoredSaves(url, newest, max_keep, storage_options, log.warning, keep_every=keep_every)}
    destinations |= {name: StoredSaves(url, name, 1, storage_options, log.warning) for name in extra}
    n_ranks = collective.world_size if all_ranks_see(finals[0], collective) else 1
    if is_bucket_url(url):
        n_ranks = 1  # the Hub limits the requests of a user, and ranks that share files ask again and again
    return Uploads(destinations, log, collective.rank, n_ranks).start()
