"""``upload_to``: ranks share the upload of each committed save, in the background."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from logging import LoggerAdapter
from pathlib import Path

import torch.distributed as dist

from xhf_hooks.errors import XhfError
from xhf_hooks.files.manifest import Manifest, parse_manifest
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.format.text import counted, size_text
from xhf_hooks.options import CallOptions, RunOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.hub_bucket import is_bucket_url
from xhf_hooks.places.retention import Retention
from xhf_hooks.places.store import StoredSaves, run_prefix, send_file
from xhf_hooks.planning.planner import balanced
from xhf_hooks.planning.types import Step
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.ranks.rendezvous import find_store, store_has
from xhf_hooks.runs.access import all_ranks_see
from xhf_hooks.runs.ends.each_save import EachSave, SaveJob

#: Seconds between two requests to the store for what other ranks have uploaded.
_LEAST_POLL_SECS, _MOST_POLL_SECS = 0.1, 2.0
#: Seconds between two looks at what rank 0 says.
_BOARD_POLL_SECS = 0.05


class UploadBoard:
    """What ranks tell each other about the uploads of a run, in the key-value store of their process group.

    Args:
        store: A store of torch for this run alone.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def announce(self, number: int, save_name: str) -> None:
        """Say under which name in the store a save is uploaded; '' if it is not. Runs on: rank 0."""
        with contextlib.suppress(RuntimeError):  # the rank that hosts the store has ended
            if not store_has(self._store, f'{number}'):
                self._store.set(f'{number}', save_name)

    def read(self, number: int) -> str | None:
        """What rank 0 has announced for a save; None if it has not yet."""
        try:
            return self._store.get(f'{number}').decode() if store_has(self._store, f'{number}') else None
        except RuntimeError:  # the rank that hosts the store, mostly rank 0, has ended
            return ''

    def leave(self) -> None:
        """Say that this rank will upload no more. Runs on: other ranks than rank 0."""
        with contextlib.suppress(RuntimeError):
            self._store.add('left', 1)

    def count_left(self) -> int:
        """How many ranks will upload no more."""
        with contextlib.suppress(RuntimeError):
            return self._store.add('left', 0)
        return 0


class Uploads(EachSave):
    """The uploads of a run. Public methods run on all ranks.

    Rank 0 waits for no other rank: it lists in the store which files other ranks have uploaded, and uploads missing
    files itself, since their rank may have died or may not reach the store. Other ranks wait until rank 0 announces
    that it has begun this save, or will not. A file that they cannot upload is no error: rank 0 uploads it, or logs why
    it cannot.

    Inherited from :class:`.EachSave`: a thread that calls :meth:`process` with one job after another and logs errors;
    ``add``, which queues a job in ``_waiting``; ``pause``, which raises once ``close`` has set ``_must_end``. Since
    ``must_finish`` is set, an end waits for the uploads even when training was interrupted.

    Args:
        destinations: Where saves are uploaded to, by the name of their folder.
        board: What ranks tell each other; None if rank 0 uploads everything.
        n_ranks: Number of ranks that share the files.

    Attributes:
        patience_secs: How long rank 0 waits for other ranks, or as long as its own files took if that is longer; and
            how long an interrupted rank stays for what rank 0 announces.
    """

    patience_secs = 30.0

    def __init__(
        self,
        destinations: Mapping[str, StoredSaves],
        log: LoggerAdapter,
        board: UploadBoard | None = None,
        rank: int = 0,
        n_ranks: int = 1,
    ) -> None:
        self._destinations = destinations
        self._board = board
        self._rank = rank
        self._n_ranks = n_ranks
        self._number = 0
        self._is_sending = False  # on other ranks than rank 0
        super().__init__('uploads', 'the upload of', log, must_finish=True)

    def require_usable(self) -> None:
        """Check before training that uploads will work.

        Raises:
            StoreError: They will not. Other ranks do not know this error.
        """
        destinations = [*self._destinations.values()]
        if self._rank < self._n_ranks:  # all have the same URL
            destinations[0].store.require_usable(deletes=any(each.retention.max_keep != -1 for each in destinations))

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
            # Only rank 0 skips saves for newer ones; it announces to the other ranks which ones
            self.add(SaveJob(target.name, step, folder, release, self._number), replaces=self._rank == 0)

    def process(self, job: SaveJob) -> None:
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

    def work(self, job: SaveJob) -> None:
        """Upload a save, or this rank's share of it."""
        super().work(job)
        self._announce(job, '')  # if it failed before it had a name

    def close(self) -> None:
        """Drop the uploads that are left, log all that were not made, and end the thread."""
        if self._must_end.is_set():
            return
        if self._board is not None and self._rank != 0:
            self._board.leave()
        super().close()
        if self.failed:
            self._log.warning(f'not uploaded: {"; ".join(self.failed)}')
        if self._rank == 0 and not self._thread.is_alive():
            for destination in self._destinations.values():
                destination.clean_at_end()

    def left(self) -> list[str]:
        """The saves on which work is left. Rank 0 may have died, and never begin what other ranks wait for."""
        if self._rank == 0 or self._is_sending:
            return super().left()
        now = time.monotonic()
        jobs = [job for job in [self._current, *self._waiting] if job is not None]
        return [str(job) for job in jobs if now - job.queued_at < self.patience_secs]

    def _publish(self, saves: StoredSaves, job: SaveJob, manifest: Manifest, data: bytes) -> str:
        """Returns the name of the save there."""
        began, files = time.monotonic(), manifest.files
        prefix = saves.begin(job.step.label, files)
        self._announce(job, prefix)
        self._send(saves, job, prefix, manifest, self._share(manifest))
        own_secs = time.monotonic() - began
        deadline, n_taken_over = time.monotonic() + max(self.patience_secs, own_secs), 0
        while missing := saves.missing(prefix, files):
            is_alone = self._board is None or self._board.count_left() == self._n_ranks - 1
            if time.monotonic() < deadline and not is_alone:
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

    def _help(self, job: SaveJob) -> None:
        """Upload this rank's files once rank 0 has begun the save."""
        if self._board is None:
            return
        while (prefix := self._board.read(job.number)) is None:
            self.pause(_BOARD_POLL_SECS)  # raises once the run has ended
        if not prefix:
            return
        self._is_sending = True
        try:
            manifest, _ = _manifest_of(job)
            self._send(self._destinations[job.name], job, prefix, manifest, self._share(manifest))
        finally:
            self._is_sending = False

    def _announce(self, job: SaveJob, save_name: str) -> None:
        if self._board is not None and self._rank == 0:
            self._board.announce(job.number, save_name)

    def _drop(self, job: SaveJob, why: str) -> None:
        self._announce(job, '')
        if self._rank == 0:  # which logs it for all ranks
            super()._drop(job, why)

    def _share(self, manifest: Manifest) -> list[str]:
        names = _largest_first(manifest)
        owners = balanced([manifest.files[name].nbytes for name in names], range(self._n_ranks))
        return [name for name, owner in zip(names, owners, strict=True) if owner == self._rank]

    def _send(self, saves: StoredSaves, job: SaveJob, prefix: str, manifest: Manifest, names: Sequence[str]) -> None:
        for name in names:
            self.pause()  # raises once the run has ended
            send_file(saves.store, prefix, name, job.folder / name, manifest.files[name])


def _largest_first(manifest: Manifest) -> list[str]:
    return sorted(manifest.files, key=lambda name: (-manifest.files[name].nbytes, name))


def _manifest_of(job: SaveJob) -> tuple[Manifest, bytes]:
    data = (job.folder / MANIFEST_NAME).read_bytes()
    return parse_manifest(data, str(job.folder)), data


def start_uploads(
    options: RunOptions | CallOptions,
    paths: Sequence[Path],
    collective: Collective,
    log: LoggerAdapter,
    timestamp: str | None,
) -> Uploads:
    """Start the thread of the uploads to ``upload_to``. Runs on: all ranks.

    Args:
        options: ``upload_keep`` and ``keep_every`` are not for the best saves.
        paths: The folders of saves; the first is that of the newest save.
        timestamp: As in :func:`.run_prefix`.

    Raises:
        AgreedError: Rank 0 cannot write next to the first of ``paths``, by which it is tried whether all ranks see it.
    """
    prefix, word = collective.from_rank0('preflight', lambda: (run_prefix(timestamp), uuid.uuid4().hex))
    url, store = f'{options.upload_to}/{prefix}', find_store(f'xhf_hooks/{word}')
    newest, *extra = (path.name for path in paths)
    retention = Retention(options.upload_keep, options.keep_every)
    destinations = {newest: StoredSaves(url, newest, retention, options.storage_options, log.warning)}
    destinations |= {name: StoredSaves(url, name, Retention(1), options.storage_options, log.warning) for name in extra}
    # The Hub limits the requests of a user, and rank 0 asks again and again for what the others have uploaded
    is_shared = all_ranks_see(paths[0], collective) and store is not None and not is_bucket_url(url)
    board = UploadBoard(store) if store is not None and is_shared else None
    return Uploads(destinations, log, board, collective.rank, collective.world_size if is_shared else 1).start()
