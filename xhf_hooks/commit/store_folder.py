"""Saves that go to a store without touching a disk: ranks write the files, rank 0 publishes the save."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xhf_hooks.commit.target import SaveTarget, write_indexes
from xhf_hooks.concurrency.low_priority import lower_priority
from xhf_hooks.concurrency.thread_pool import WorkerThreads
from xhf_hooks.errors import IncompleteError, StoreError
from xhf_hooks.files.memory_folder import MemoryFolder
from xhf_hooks.integrity.manifest import MANIFEST_NAME, describe_folder, manifest_text, parse_commit
from xhf_hooks.planning.types import SavePlan, Step, WrittenTensor
from xhf_hooks.stores.open_store import open_store
from xhf_hooks.stores.publication import Publication, StoredSave, read_pointer, require_answer
from xhf_hooks.stores.store import Store
from xhf_hooks.stores.stored_folder import StoredFolder

#: Default name of the saves under a URL.
NAME = 'hf_model'


class StoreFolder(SaveTarget):
    """The saves of one name under the URL of a store; ``<name>.json`` there names the newest (stores/publication.py).

    Each save has a new, unique prefix. Nothing is renamed: the objects can be seen while ranks write them, but readers
    follow the pointer, which names only complete saves.

    Args:
        url: URL of the store; see :func:`xhf_hooks.stores.open_store`.
        options: Arguments for its library.
        name: Name of the saves.
        beside_training: Whether training goes on during saves and must not be slowed down.
    """

    def __init__(
        self,
        url: str,
        max_keep: int,
        options: Mapping[str, Any] | None = None,
        name: str = NAME,
        beside_training: bool = False,
    ) -> None:
        super().__init__(f'{url}/{name}', max_keep)
        self._prepare_thread = lower_priority if beside_training else None
        self._url, self._options, self._name = url, options, name
        self._number = 0
        self._prefix: str | None = None
        self._assets: MemoryFolder | None = None
        self._opened: Store | None = None
        self._published: Publication | None = None
        self._given_up: list[str] = []

    @property
    def _store(self) -> Store:
        """The connection of this process."""
        if self._opened is None:
            self._opened = open_store(self._url, self._options, option='out_dir', prepare_thread=self._prepare_thread)
        return self._opened

    def connect(self) -> None:
        require_answer(self._store)

    def claim(self) -> None:
        publication = Publication(self._store, self._name, self.max_keep)
        publication.claim()
        self._published = publication
        manifest = self.newest_manifest()
        commit = None if manifest is None else parse_commit(manifest)
        self._number = 0 if commit is None else commit.number

    def newest_manifest(self) -> bytes | None:
        """The manifest of the newest save, whoever made it; None if there is none. Runs on: rank 0.

        Raises:
            StoreError: The store cannot be read.
        """
        pointer = read_pointer(self._store, self._name)
        return None if pointer is None else self._store.get(f'{pointer.newest}/{MANIFEST_NAME}')

    def release(self) -> None:
        self._close_assets()
        if self._published is not None:
            with contextlib.suppress(StoreError):  # the next run clears it
                self._delete_given_up()
                self._published.delete_released()
            self._published.release()
            self._published = None

    def release_forgotten(self) -> None:
        if self._published is not None:  # a store may be slow to answer
            threading.Thread(target=self.release, name='xhf-store-release', daemon=True).start()

    def open_staging(self, step: Step | None = None) -> Path:
        self.warnings = []
        self._delete_given_up()
        self._close_assets()
        self._assets = MemoryFolder()
        if step is not None:
            self._prefix = self._publication.new_prefix(step.label)
            self._publication.begin(self._prefix)
        return self._assets.path

    @property
    def token(self) -> str:
        return self._prefix or ''

    def place(self, token: str) -> StoredFolder:
        return StoredFolder(self._store, token)

    def name_of(self, token: str) -> str:
        return f'{self._url}/{token}'

    def beside(self, suffix: str) -> StoreFolder:
        name, beside_training = f'{self._name}_{suffix}', self._prepare_thread is not None
        return StoreFolder(self._url, 1, self._options, name, beside_training)

    def free_nbytes(self) -> None:
        return None

    def require_room(self, nbytes: int) -> None:
        return None

    def commit(
        self,
        plan: SavePlan,
        tensors: Sequence[WrittenTensor],
        step: Step,
        facts: dict[str, Any],
        verify: str = 'sizes',
        threads: WorkerThreads | None = None,
    ) -> None:
        folder, place = self._assets.path, self.place(self.token)
        write_indexes(plan, folder)
        number = self._number + 1
        manifest = describe_folder(folder, plan, tensors, step, self._numbered(facts, number))
        weights = {file.name for file in plan.files}
        for name in manifest['files'].keys() - weights:
            data = (folder / name).read_bytes()
            self._store.put(place.key(name), data)
            if verify == 'full':
                place.require(name, 0, data)
        _require_sizes(place, {name: file['nbytes'] for name, file in manifest['files'].items()})
        self._publish(manifest)
        self._number = number
        self._close_assets()

    def keep(self) -> StoredSave:
        """The save that was just committed, for readers. No save may be committed meanwhile. Runs on: rank 0."""
        return self._publication.keep(self.token)

    def abandon(self) -> None:
        self._close_assets()
        prefix, self._prefix = self._prefix, None
        if prefix is None or self._publication.is_newest(prefix):
            return
        self._given_up.append(prefix)
        with contextlib.suppress(StoreError):
            self._publication.abandon(prefix)
            self._publication.begin(prefix)  # another rank may be sending its last object

    def _publish(self, manifest: dict[str, Any]) -> None:
        step = manifest['step']
        try:
            self._publication.publish(self.token, manifest_text(manifest).encode(), step)
        except StoreError as error:
            if not self._publication.is_newest(self.token):
                raise
            self.warnings.append(f'the save is complete, but older objects were not all deleted: {error}')

    @property
    def _publication(self) -> Publication:
        if self._published is None:
            raise StoreError(f'{self.final}: not claimed')
        return self._published

    def _close_assets(self) -> None:
        assets, self._assets = self._assets, None
        if assets is not None:
            assets.close()

    def _delete_given_up(self) -> None:
        while self._given_up:
            self._publication.abandon(self._given_up[-1])
            self._given_up.pop()


def _require_sizes(place: StoredFolder, expected: Mapping[str, int]) -> None:
    found = place.sizes()
    wrong = {name: found.get(name) for name, nbytes in expected.items() if found.get(name) != nbytes}
    for name in sorted(wrong)[:1]:
        raise IncompleteError(
            f'{place.url_of(name)}: expected {expected[name]} bytes, the store has {wrong[name]}, although it '
            f'acknowledged all of them; this affects {len(wrong)} of {len(expected)} files'
        )
