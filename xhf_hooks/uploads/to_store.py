"""Uploads to a store. Each save has its own prefix, and all ranks send files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from xhf_hooks.integrity.manifest import MANIFEST_NAME
from xhf_hooks.planning.types import Step
from xhf_hooks.stores import Store
from xhf_hooks.stores.publication import Publication, require_answer
from xhf_hooks.stores.stored_folder import StoredFolder
from xhf_hooks.uploads.file_upload import upload_file
from xhf_hooks.uploads.job import Means, UploadJob


class StoreDestination:
    """A :class:`.Destination` under a URL.

    Args:
        name: Name of the saves.
        max_keep: How many uploaded saves to keep; -1 keeps all.
    """

    takes_from_all_ranks = True

    def __init__(self, store: Store, name: str, max_keep: int) -> None:
        self._store = store
        self._publication = Publication(store, name, max_keep)
        self.where = store.url
        self._marked: str | None = None

    def claim(self) -> None:
        self._publication.claim()

    def require_usable(self) -> None:
        require_answer(self._store)

    def new_place(self, step: Step) -> str:
        return self._publication.new_prefix(step.label)

    def send(self, job: UploadJob, names: Sequence[str], means: Means) -> int:
        if names and self._marked != job.place:
            self._publication.begin(job.place)
            self._marked = job.place
        send = partial(upload_file, senders=means.senders, bandwidth=means.bandwidth, is_wanted=means.is_wanted)
        return sum(
            send(self._store, f'{job.place}/{name}', job.folder / name, job.manifest.files[name]) for name in names
        )

    def missing(self, job: UploadJob) -> list[str]:
        sizes = StoredFolder(self._store, job.place).sizes()
        return [name for name, file in job.manifest.files.items() if sizes.get(name) != file.nbytes]

    def publish(self, job: UploadJob) -> None:
        step = {'unit': job.step.unit, 'number': job.step.number}
        self._publication.publish(job.place, (job.folder / MANIFEST_NAME).read_bytes(), step)

    def abandon(self, job: UploadJob) -> None:
        self._publication.abandon(job.place)

    def release(self) -> None:
        self._publication.release()
