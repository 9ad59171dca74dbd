"""Saves in a store: each has its own prefix, and a pointer that moves last names the newest.

    hf_model.json                    the pointer, the only object that is ever replaced
    hf_model_iter_500/...            a save; xhf_manifest.json is its last object

The pointer also says which run wrote it last. A run that finds another run there publishes nothing more, so of two runs
the one that began later goes on. And it lists the files of saves that are being written or deleted: after a kill, the
next run deletes those. Nothing else is listed, and nothing is deleted that the pointer or a manifest does not name.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError, IncompleteError, StoreError
from xhf_hooks.format.checksum import crc32, to_hex
from xhf_hooks.format.text import counted, some
from xhf_hooks.integrity.manifest import (
    MANIFEST_NAME,
    FileRecord,
    describe_folder,
    manifest_text,
    parse_commit,
    parse_manifest,
)
from xhf_hooks.places.objects import Store, open_store
from xhf_hooks.places.target import SaveTarget, write_indexes
from xhf_hooks.planning.types import SavePlan, Step, WrittenTensor
from xhf_hooks.system import MemoryFolder
from xhf_hooks.threads import WorkerThreads

#: Default name of the saves under a URL.
NAME = 'hf_model'
#: 2: run, writing, unfinished. 1: before these.
_FORMAT_VERSION = 2
_READ_NBYTES = 2**20


@dataclass(frozen=True)
class Pointer:
    """The content of the pointer.

    Attributes:
        newest: Prefix of the newest save, without a slash; None before the first.
        saves: Prefixes of complete saves, from the oldest to the newest.
        step: Unit and number of the newest step.
        run: Random id of the run that wrote this.
        time: When, in UTC.
        writing: Prefix of the save that is being written, if any.
        number: Which save of the run that is.
        unfinished: Prefixes of saves that are being written or deleted, and their files.
    """

    newest: str | None = None
    saves: tuple[str, ...] = ()
    step: Mapping[str, Any] | None = None
    run: str = ''
    time: str = ''
    writing: str | None = None
    number: int = 0
    unfinished: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def as_bytes(self) -> bytes:
        return (json.dumps({'format_version': _FORMAT_VERSION, **asdict(self)}, indent=1) + '\n').encode()


@dataclass(frozen=True)
class StoredSave:
    """A save in a store, for readers. The run that made it does not delete it until ``release``; other runs may.

    Attributes:
        release: Call it once, from any thread.
    """

    url: str
    release: Callable[[], object] = lambda: None


def pointer_key(name: str) -> str:
    """The key of the pointer for saves of this name, such as ``hf_model``."""
    return f'{name}.json'


def read_pointer(store: Store, name: str) -> Pointer | None:
    """Read the pointer; None if there is none yet.

    Raises:
        StoreError: The store cannot be read, or the object is not a pointer.
    """
    data = store.get(pointer_key(name))
    if data is None:
        return None
    try:
        content = json.loads(data)
        version = content.pop('format_version')
        pointer = Pointer(**{**content, 'saves': tuple(content['saves'])})
        ours = re.compile(rf'{re.escape(name)}_(iter|epoch)_\d+(_\d+)?')
        named = [*pointer.saves, *pointer.unfinished, *filter(None, (pointer.newest, pointer.writing))]
        files = [file for names in pointer.unfinished.values() for file in names]
        if version in (1, _FORMAT_VERSION) and all(map(ours.fullmatch, named)) and not any('..' in f for f in files):
            return pointer
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise StoreError(
        f'{store.url}/{pointer_key(name)}: not written by this package, or by a newer version; move it away, or set '
        f'{store.option} to another place'
    )


class StoredSaves:
    """The saves of one name under one URL. Runs on: rank 0, one thread at a time.

    Args:
        name: A name such as ``hf_model``.
        max_keep: How many saves to keep, including the newest; -1 keeps all.

    Attributes:
        run: Random id of this run.
        warnings: What was found that is not ours, for the log; the caller clears them.
    """

    def __init__(self, store: Store, name: str, max_keep: int) -> None:
        self.store, self.name, self.max_keep = store, name, max_keep
        self.run = uuid.uuid4().hex
        self.warnings: list[str] = []
        self._pointer: Pointer | None = None  # None: not claimed
        self._taken: set[str] = set()
        self._deleted: set[str] = set()
        self._in_use: set[str] = set()  # readers remove from it at any time
        self._in_doubt: str | None = None  # the pointer may name it: the outcome of that request is unknown

    def claim(self) -> None:
        """Before training, check that the place can be used, take it over, and clean up after killed runs.

        Raises:
            StoreError: It cannot be used.
        """
        found = read_pointer(self.store, self.name) or Pointer()
        if found.newest is not None and self.store.get(f'{found.newest}/{MANIFEST_NAME}') is None:
            raise StoreError(
                f'{self.store.url}/{found.newest}: the newest save lacks its {MANIFEST_NAME}; restore it, or delete '
                f'{pointer_key(self.name)}'
            )
        self._taken = {*found.saves, *found.unfinished}
        self._write(replace(found, writing=None, number=0))
        self.clean()

    def newest_manifest(self) -> bytes | None:
        """The manifest of the newest save, whoever made it; None if there is none.

        Raises:
            StoreError: The store cannot be read.
        """
        pointer = read_pointer(self.store, self.name)
        if pointer is None or pointer.newest is None:
            return None
        return self.store.get(f'{pointer.newest}/{MANIFEST_NAME}')

    def begin(self, label: str, files: Collection[str], number: int = 0) -> str:
        """Take an unused prefix for a save, such as ``hf_model_iter_500``, and list its files in the pointer.

        Args:
            number: Which save of this run it is, for other ranks that read the pointer.

        Raises:
            StoreError: A request failed, or another run has taken the place.
        """
        pointer = self._read()
        prefix = name = f'{self.name}_{label}'
        count = 1
        while prefix in self._taken or self.store.sizes(prefix):
            count += 1
            prefix = f'{name}_{count}'
        self._taken.add(prefix)
        unfinished = {**pointer.unfinished, prefix: [*files, MANIFEST_NAME]}
        self._write(replace(pointer, writing=prefix, number=number, unfinished=unfinished))
        return prefix

    def require_ours(self) -> None:
        """Check that no other run has taken the place.

        Raises:
            StoreError: One has, or the pointer cannot be read.
        """
        self._read()

    def publish(self, prefix: str, manifest: bytes, step: Step) -> None:
        """Make a save whose other objects are all there the newest one. :meth:`clean` then deletes older ones.

        Raises:
            StoreError: A request failed, or another run has taken the place.
        """
        pointer = self._read()
        self.store.put(f'{prefix}/{MANIFEST_NAME}', manifest)
        saves = (*pointer.saves, prefix)
        self._in_doubt = prefix
        self._write(
            self._without_outdated(
                replace(
                    pointer,
                    newest=prefix,
                    saves=saves,
                    step={'unit': step.unit, 'number': step.number},
                    writing=None,
                    unfinished={key: names for key, names in pointer.unfinished.items() if key != prefix},
                )
            )
        )
        self._in_doubt = None

    def clean(self) -> None:
        """Delete the files of older saves, and of those that were begun and not published.

        Raises:
            StoreError: A request failed; the next save or run deletes them.
        """
        if self._pointer is None:
            return
        for prefix in [*self._pointer.unfinished]:
            if prefix in self._deleted or prefix == self._in_doubt:
                continue
            self.store.delete([f'{prefix}/{name}' for name in self._pointer.unfinished[prefix]])
            self._deleted.add(prefix)
            if left := self.store.sizes(prefix):
                self.warnings.append(
                    f'{self.store.url}/{prefix}: {counted(len(left), "object")} there did not come from this package '
                    f'and will stay: {some(sorted(left))}'
                )

    def keep(self, prefix: str) -> StoredSave:
        """A published save, which is not deleted while it is in use. No save may be published meanwhile."""
        self._in_use.add(prefix)
        return StoredSave(f'{self.store.url}/{prefix}', partial(self._in_use.discard, prefix))

    def release(self) -> None:
        """At the end of the run, delete what is due. Never raises: the next run deletes the rest."""
        if self._pointer is None:
            return
        with contextlib.suppress(StoreError):
            if self._without_outdated(self._pointer) != self._pointer:
                self._write(self._without_outdated(self._read()))
            self.clean()
        self._pointer = None

    def _without_outdated(self, pointer: Pointer) -> Pointer:
        old = [] if self.max_keep == -1 else [s for s in pointer.saves[: -self.max_keep] if s not in self._in_use]
        if not old:
            return pointer
        files = {save: self._files_of(save) for save in old}
        saves = tuple(save for save in pointer.saves if save not in old)
        return replace(pointer, saves=saves, unfinished={**pointer.unfinished, **files})

    def _files_of(self, prefix: str) -> list[str]:
        """The files that a save's manifest names: only those are deleted."""
        manifest = self.store.get(f'{prefix}/{MANIFEST_NAME}')
        if manifest is None:
            return []
        with contextlib.suppress(DamagedError, ValueError, AttributeError):
            return [*parse_manifest(json.loads(manifest), prefix).files, MANIFEST_NAME]
        return []

    def _read(self) -> Pointer:
        """The pointer as it is in the store.

        Raises:
            StoreError: Another run has written it since.
        """
        if self._pointer is None:
            raise StoreError(f'{self.store.url}/{self.name}: not claimed')
        found = read_pointer(self.store, self.name) or self._pointer  # somebody may have deleted it
        if found.run != self.run:
            raise StoreError(
                f'{self.store.url}/{pointer_key(self.name)}: another run saves here since {found.time}, so this run '
                f'does not any more; set {self.store.option} to another place'
            )
        left = {prefix: names for prefix, names in found.unfinished.items() if prefix not in self._deleted}
        return replace(found, unfinished=left)

    def _write(self, pointer: Pointer) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec='seconds')
        pointer = replace(pointer, run=self.run, time=now)
        self.store.put(pointer_key(self.name), pointer.as_bytes())
        self._pointer = pointer


def send_file(store: Store, prefix: str, name: str, path: Path, record: FileRecord) -> None:
    """Upload a file of a save. Runs on: any rank.

    Raises:
        DamagedError: It does not match the manifest, so it is not uploaded.
        StoreError: It was not stored.
    """
    found = nbytes = 0
    with path.open('rb', buffering=0) as file:
        while data := file.read(_READ_NBYTES):
            found, nbytes = crc32(memoryview(data), found), nbytes + len(data)
    if nbytes != record.nbytes or record.crc32 not in (None, found):
        raise DamagedError(
            f'{path}: changed since the save: expected {record.nbytes} bytes with CRC-32 '
            f'{to_hex(record.crc32 or 0)}, found {nbytes} with {to_hex(found)}; it is not uploaded'
        )
    store.put_file(f'{prefix}/{name}', path)


class StoreFolder(SaveTarget):
    """The saves of one name under the URL of a store, which ranks write to a scratch folder first.

    Each rank writes its files to a folder of its own, uploads them, and deletes the folder.

    Args:
        url: URL of the store.
        options: Arguments for its library.
        name: Name of the saves.
        warn: Called at once when a request fails or gets no answer.
    """

    is_shared = False
    fsync = False  # scratch folders need not survive

    def __init__(
        self,
        url: str,
        max_keep: int,
        options: Mapping[str, Any] | None = None,
        name: str = NAME,
        warn: Callable[[str], object] = lambda said: None,
    ) -> None:
        super().__init__(f'{url}/{name}', max_keep)
        self._url, self._options, self._warn = url, options, warn
        self._opened: Store | None = None
        self._saves: StoredSaves | None = None
        self._scratch: MemoryFolder | None = None
        self._prefix = ''
        self._manifest: dict[str, Any] = {}
        self._number = 0

    @property
    def _store(self) -> Store:
        """The connection of this process."""
        if self._opened is None:
            self._opened = open_store(self._url, self._options, option='out_dir', warn=self._warn)
        return self._opened

    def connect(self) -> None:
        self._store.require_usable()

    def claim(self) -> None:
        saves = StoredSaves(self._store, self.name, self.max_keep)
        saves.claim()
        self._saves, self.warnings = saves, [*saves.warnings]
        manifest = self.newest_manifest()
        commit = None if manifest is None else parse_commit(manifest)
        self._number = 0 if commit is None else commit.number

    def newest_manifest(self) -> bytes | None:
        """The manifest of the newest save, whoever made it; None if there is none. Runs on: rank 0.

        Raises:
            StoreError: The store cannot be read.
        """
        return self._claimed.newest_manifest()

    def release(self) -> None:
        self.end_save()
        if self._saves is not None:
            self._saves.release()
            self._saves = None

    def release_forgotten(self) -> None:
        if self._saves is not None:  # a store may be slow to answer
            threading.Thread(target=self.release, name='xhf-store-release', daemon=True).start()

    def open_staging(self, step: Step | None = None) -> Path:
        self.warnings, self._claimed.warnings = [], []
        self.end_save()
        return self.place('')

    @property
    def token(self) -> str:
        return ''

    def place(self, token: str) -> Path:
        if self._scratch is None:
            self._scratch = MemoryFolder(Path(tempfile.gettempdir()))
        return self._scratch.path

    def name_of(self, token: str) -> str:
        return f'{self._url}/{self._prefix}'

    def beside(self, suffix: str) -> StoreFolder:
        return StoreFolder(self._url, 1, self._options, f'{self.name}_{suffix}', self._warn)

    def free_nbytes(self) -> None:
        return None

    def require_room(self, nbytes: int) -> None:
        return None

    def begin_upload(
        self, plan: SavePlan, tensors: Sequence[WrittenTensor], step: Step, facts: dict[str, Any]
    ) -> tuple[str, dict[str, FileRecord]]:
        folder = self.place('')
        write_indexes(plan, folder)
        self._manifest = describe_folder(folder, plan, tensors, step, self._numbered(facts, self._number + 1))
        records = {name: replace(found, tensors=None) for name, found in self._records().items()}
        return self._claimed.begin(step.label, [*records]), records

    def upload(self, begun: tuple[str, dict[str, FileRecord]], names: Collection[str], verify: str) -> None:
        self._prefix, records = begun
        for name in names:
            record = records[name]
            send_file(self._store, self._prefix, name, self.place('') / name, record)
            if verify == 'full':
                found = self._store.crc32(f'{self._prefix}/{name}', record.nbytes)
                if found != record.crc32:
                    raise IncompleteError(
                        f'{self._url}/{self._prefix}/{name}: read back, its CRC-32 is {found:08x}; expected '
                        f'{record.crc32:08x}, as sent. Something changes objects there; set out_dir to another place'
                    )

    def commit(
        self,
        plan: SavePlan,
        tensors: Sequence[WrittenTensor],
        step: Step,
        facts: dict[str, Any],
        verify: str = 'sizes',
        threads: WorkerThreads | None = None,
    ) -> None:
        saves = self._claimed
        saves.require_ours()
        sizes = self._store.sizes(self._prefix)
        wrong = [name for name, record in self._records().items() if sizes.get(name) != record.nbytes]
        if wrong:
            raise IncompleteError(
                f'{self._url}/{self._prefix}/{wrong[0]}: the store has {sizes.get(wrong[0])} bytes, although it '
                f'acknowledged the file; this affects {len(wrong)} of {len(self._records())} files'
            )
        saves.publish(self._prefix, manifest_text(self._manifest).encode(), step)
        self._number += 1
        try:
            saves.clean()
        except StoreError as error:
            self.warnings.append(f'the save is complete, but older objects were not all deleted: {error}')
        self.warnings += saves.warnings

    def keep(self) -> StoredSave:
        """The save that was just committed, for readers. No save may be committed meanwhile. Runs on: rank 0."""
        return self._claimed.keep(self._prefix)

    def abandon(self) -> None:
        self.end_save()

    def end_save(self) -> None:
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.close()

    def _records(self) -> dict[str, FileRecord]:
        return parse_manifest(self._manifest, self.final).files

    @property
    def _claimed(self) -> StoredSaves:
        if self._saves is None:
            raise StoreError(f'{self.final}: not claimed')
        return self._saves
