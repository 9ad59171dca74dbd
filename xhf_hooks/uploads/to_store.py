"""Uploads to a store. Each save has its own prefix, and all ranks send files."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

from xhf_hooks.errors import StoreError
from xhf_hooks.integrity.manifest import MANIFEST_NAME
from xhf_hooks.planning.types import Step
from xhf_hooks.stores import Store
from xhf_hooks.stores.publication import Publication, require_answer
from xhf_hooks.stores.stored_folder import StoredFolder
from xhf_hooks.stores.stored_object import StoredObject
from xhf_hooks.uploads.file_upload import FileUpload
from xhf_hooks.uploads.job import Means, UploadJob

#: Files that were handed to the senders and not yet checked in the store.
_MOST_UNDER_WAY = 2


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
        is_first = self._marked != job.place
        if names and is_first:
            self._publication.begin(job.place)
            self._marked = job.place
        under_way: deque[tuple[FileUpload, StoredObject]] = deque()
        nbytes = 0
        try:
            for name in names:
                file = FileUpload(self._store, f'{job.place}/{name}', job.folder / name, job.manifest.files[name])
                if not is_first and file.is_there():
                    continue
                under_way.append((file, file.send(means)))
                while len(under_way) > _MOST_UNDER_WAY:  # the next file is being sent meanwhile
                    nbytes += FileUpload.require_stored(*under_way.popleft())
            while under_way:
                nbytes += FileUpload.require_stored(*under_way.popleft())
        finally:
            for _, made in under_way:  # files that have arrived need not be sent again
                if not means.is_wanted():
                    made.discard()
                with contextlib.suppress(Exception):
                    made.commit()
        return nbytes

    def missing(self, job: UploadJob) -> list[str]:
        sizes = StoredFolder(self._store, job.place).sizes()
        return [name for name, file in job.manifest.files.items() if sizes.get(name) != file.nbytes]

    def publish(self, job: UploadJob) -> None:
        step = {'unit': job.step.unit, 'number': job.step.number}
        self._publication.publish(job.place, (job.folder / MANIFEST_NAME).read_bytes(), step)

    def abandon(self, job: UploadJob) -> None:
        self._publication.abandon(job.place)

    def release(self) -> None:
        with contextlib.suppress(StoreError):  # the next run deletes them
            self._publication.delete_released()
        self._publication.release()
