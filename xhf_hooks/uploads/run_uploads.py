"""The uploads of one run: checked before training, started after each commit, finished at the end."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.commit.checkpoint_folder import new_name
from xhf_hooks.commit.kept_folder import KeptFolder
from xhf_hooks.concurrency.low_priority import lower_priority
from xhf_hooks.config.options import CallOptions, RunOptions
from xhf_hooks.distributed.collective import Collective
from xhf_hooks.distributed.shared_filesystem import is_shared
from xhf_hooks.format.text import counted
from xhf_hooks.planning.types import Step
from xhf_hooks.stores import open_store
from xhf_hooks.telemetry.log import RunLog
from xhf_hooks.uploads.job import Destination, UploadJob
from xhf_hooks.uploads.to_hub import PREFIX, HubDestination
from xhf_hooks.uploads.to_store import StoreDestination
from xhf_hooks.uploads.upload_thread import UploadThread

_RELEASE_SECS = 10.0


@dataclass(frozen=True)
class _Offer:
    """What rank 0 tells the other ranks about a save."""

    place: str
    folder: str
    for_all_ranks: bool
    still_wanted: Sequence[int]


def uploads_of_run(
    options: RunOptions | CallOptions, finals: Sequence[Path], collective: Collective, log: RunLog
) -> RunUploads | None:
    """The uploads that the options request; None without ``upload_to``. Runs on: all ranks.

    Args:
        finals: The folders of saves; the first is that of the newest save.

    Raises:
        AgreedError: The place cannot be opened.
    """
    if options.upload_to is None:
        return None
    seen_by_all = is_shared(new_name(finals[0], 'shared'), collective)
    destinations: dict[str, Destination] = {}
    with collective.stage('preflight'):
        for final in finals:
            if options.upload_to.startswith(PREFIX):
                destinations[final.name] = HubDestination(options.upload_to, final.name, is_first=final == finals[0])
                continue
            store = open_store(options.upload_to, options.backend_args, prepare_thread=lower_priority)
            max_keep = options.upload_keep if final == finals[0] else 1
            destinations[final.name] = StoreDestination(store, final.name, max_keep)
    return RunUploads(destinations, log, wait_secs=options.exit_wait_secs, is_shared=seen_by_all)


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
        self._thread: UploadThread | None = None
        self._process, self._number = os.getpid(), 0
        self._is_first = False
        self._claimed: list[Destination] = []

    def claim(self, rank: int) -> None:
        """Check before training that uploads will work.

        Raises:
            StoreError: They will not. Ranks have not agreed on this error.
        """
        self._is_first = rank == 0
        for number, destination in enumerate(self._destinations.values()):
            if rank == 0:
                destination.claim()
                self._claimed.append(destination)
            elif number == 0 and self._is_shared and destination.takes_from_all_ranks:
                destination.require_usable()
        self._thread = UploadThread(self._destinations, self._log)

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
                still_wanted = self._thread.still_wanted(final.name)
                offer = _Offer(destination.new_place(step), kept.path.name, for_all, still_wanted)
            except Exception as error:  # the save itself is good
                self._log.error(f'the save of {step.label} will not be uploaded: {error}')
                if kept is not None:
                    kept.release()
        offer = collective.broadcast(offer)
        self._number += 1
        if offer is None:
            return
        n_ranks = collective.world_size if offer.for_all_ranks else 1
        folder = final.with_name(offer.folder)  # other hosts may mount it elsewhere
        job = UploadJob(self._number, final.name, offer.place, step, folder, collective.rank, n_ranks, kept)
        job.is_wanted = collective.rank < n_ranks
        self._thread.add(job, offer.still_wanted)

    def wait(self) -> None:
        """Wait for uploads in progress, up to ``exit_wait_secs``. Needs no other rank."""
        thread = self._thread
        if thread is None or os.getpid() != self._process or thread.wait(0):
            return
        self._log.info('waiting for uploads')
        if not thread.wait(self._wait_secs) and self._is_first:
            self._log.error(f'uploads did not finish within exit_wait_secs={self._wait_secs:g} s')

    def end(self) -> None:
        """Wait for uploads, log what was not uploaded, release the destinations. Needs no other rank."""
        self.wait()
        self._give_up()

    def end_forgotten(self) -> None:
        """Cancel uploads of a run that was garbage-collected without being closed. Returns at once."""
        threading.Thread(target=self._give_up, name='xhf-upload-end', daemon=True).start()

    def _give_up(self) -> None:
        if os.getpid() != self._process:
            return
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()
            if self._is_first and thread.failed:
                places = ', '.join(thread.uploaded) or 'none'
                self._log.warning(f'not uploaded: {counted(len(thread.failed), "save")}; uploaded: {places}')
        claimed, self._claimed = self._claimed, []
        releasing = threading.Thread(target=_release, args=(claimed,), name='xhf-upload-release', daemon=True)
        releasing.start()
        releasing.join(_RELEASE_SECS)  # the store may hang; the next run finds its lock dead


def _release(destinations: Sequence[Destination]) -> None:
    for destination in destinations:
        destination.release()
