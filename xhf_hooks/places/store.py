"""Saves in a store: each run has a prefix of its own, and in it a pointer, which names the complete saves.

    20261127_201530_3f9a1c/              a run: when it began, and a random number
        hf_model.json                    the pointer: which save is the newest, and which are complete; it is written
                                         when the first upload begins
        hf_model_iter_500/...            a save, under its prefix; xhf_manifest.json is its last object

Since each run has a prefix of its own, two runs with one URL never meet. They need not coordinate, which would take
conditional writes, and few stores have those. A run deletes only what it has written itself, and lists nothing but its
own saves. What a killed run leaves stays there, until somebody or a lifecycle rule of the store removes its prefix.

Ranks share the upload of a save (:mod:`.upload`), and rank 0 publishes the save when all its files are there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError, IncompleteError, StoreError
from xhf_hooks.files.manifest import CommitRecord, FileRecord, parse_manifest
from xhf_hooks.format.checksum import file_size_and_crc32, to_hex
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.format.text import counted, some
from xhf_hooks.places.objects import Store
from xhf_hooks.places.retention import Retention
from xhf_hooks.system.files import errors_naming

_FORMAT_VERSION = 3


def run_prefix(timestamp: str | None) -> str:
    """A prefix for the uploads of a run, which no other run has. Runs on: rank 0.

    Args:
        timestamp: When the run began, as MMEngine writes it, such as '20261127_201530'; None: it begins now.
    """
    return f'{timestamp or time.strftime("%Y%m%d_%H%M%S")}_{uuid.uuid4().hex[:6]}'


@dataclass(frozen=True)
class Pointer:
    """The content of the pointer.

    Attributes:
        newest: Name of the newest save, such as 'hf_model_iter_500'; None before the first.
        saves: Names of complete saves, from the oldest to the newest.
        step: Unit and number of the newest step.
        time: When this was written, in UTC.
        writing: Name of the save that is being written, if any.
    """

    format_version: int = _FORMAT_VERSION
    newest: str | None = None
    saves: tuple[str, ...] = ()
    step: Mapping[str, Any] | None = None
    time: str = ''
    writing: str | None = None


def pointer_key(name: str) -> str:
    """The key of the pointer for saves of this name, such as ``hf_model``."""
    return f'{name}.json'


def read_pointer(store: Store, name: str) -> Pointer | None:
    """Read the pointer of a run; None if there is none yet.

    Args:
        store: The store at the prefix of the run.

    Raises:
        StoreError: The store cannot be read, or the object is not a pointer.
    """
    data = store.get(pointer_key(name))
    if data is None:
        return None
    ours = re.compile(rf'{re.escape(name)}_(iter|epoch)_\d+(_\d+)?')
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(data)
        pointer = Pointer(**{**content, 'saves': tuple(content['saves'])})
        names = [*pointer.saves, *filter(None, (pointer.newest, pointer.writing))]
        if pointer.format_version == _FORMAT_VERSION and all(map(ours.fullmatch, names)):
            return pointer
    raise StoreError(f'{store.url}/{pointer_key(name)}: not written by this package, or by another version')


class StoredSaves:
    """The uploads of one target of a run. Runs on: rank 0, one thread at a time.

    Args:
        url: The prefix of the run.
        name: The target's name, such as ``hf_model``.
        retention: Which saves to keep.
        storage_options: As in :meth:`.Store.open`.
        warn: Called when a request fails and is sent again, and with what was found that is not ours.

    Raises:
        StoreError: Every method but :meth:`clean_at_end` raises it if a request fails again and again.
    """

    def __init__(
        self,
        url: str,
        name: str,
        retention: Retention,
        storage_options: Mapping[str, Any] | None = None,
        warn: Callable[[str], object] = lambda said: None,
    ) -> None:
        self.url, self.name, self.retention = url, name, retention
        self._options, self._warn = storage_options, warn
        self._pointer = Pointer()  # as last written
        self._begun: set[str] = set()  # names that are not used again
        self._files: dict[str, list[str]] = {}  # of the saves that were begun and are not deleted yet
        self._commits: dict[str, CommitRecord] = {}  # by the name of a published save

    @cached_property
    def store(self) -> Store:
        """The connection of this process. Runs on: any rank."""
        return Store.open(self.url, self._options, warn=self._warn)

    def begin(self, label: str, files: Collection[str]) -> str:
        """Begin a save, such as that of ``iter_500``, and name it in the pointer; returns its name.

        Args:
            files: The names of its files.
        """
        pointer, name = self._current(), f'{self.name}_{label}'
        names = itertools.chain([name], (f'{name}_{count}' for count in itertools.count(2)))
        name = next(each for each in names if each not in self._begun)
        self._begun.add(name)
        self._files[name] = [*files, MANIFEST_NAME]
        self._write(replace(pointer, writing=name))
        return name

    def missing(self, save_name: str, files: Mapping[str, FileRecord]) -> list[str]:
        """The files of a save that are not there with their sizes."""
        sizes = self.store.sizes(save_name)
        return [file for file, record in files.items() if sizes.get(file) != record.nbytes]

    def publish(self, save_name: str, manifest: bytes) -> None:
        """Make a save whose files are all there the newest one, and delete older ones.

        Raises:
            IncompleteError: A file is not there.
        """
        content = parse_manifest(manifest, save_name)
        if missing := self.missing(save_name, content.files):
            raise IncompleteError(
                f'{self.url}/{save_name}: the store does not have {counted(len(missing), "file")} with the right '
                f'size, although it acknowledged them: {some(missing)}'
            )
        self.store.put(f'{save_name}/{MANIFEST_NAME}', manifest)
        step = {'unit': content.step.unit, 'number': content.step.number}
        pointer = self._current()
        saves = (*pointer.saves, save_name)
        self._commits[save_name] = content.commit
        outdated = self.retention.find_superfluous((save, self._commits[save]) for save in reversed(saves))
        kept = tuple(save for save in saves if save not in outdated)
        self._write(replace(pointer, newest=save_name, saves=kept, step=step, writing=None))
        try:
            self.clean()
        except StoreError as error:
            self._warn(f'the save is complete, but older objects were not all deleted: {error}')

    def clean(self) -> None:
        """Delete the files of older saves, and of those that were begun and not published.

        What is left by an error, the next save deletes.
        """
        stay = {*self._pointer.saves, self._pointer.writing}
        for name in [name for name in self._files if name not in stay]:
            self.store.delete([f'{name}/{file}' for file in self._files[name]])
            del self._files[name]
            if left := self.store.sizes(name):
                self._warn(
                    f'{self.url}/{name}: {counted(len(left), "object")} there did not come from this package '
                    f'and will stay: {some(sorted(left))}'
                )

    def clean_at_end(self) -> None:
        """At the end of the run, delete also a save whose upload was not completed. Never raises.

        Without a complete save the pointer goes, too: readers take the last run with a pointer for the newest.
        """
        with contextlib.suppress(StoreError):
            pointer = self._current()
            if not self._files.keys() <= {*pointer.saves}:
                self._write(replace(pointer, writing=None))
                self.clean()
                if not pointer.saves:
                    self.store.delete([pointer_key(self.name)])

    def _current(self) -> Pointer:
        """The pointer as the store has it: the answer to the last request that wrote it may have been lost."""
        return read_pointer(self.store, self.name) or self._pointer  # somebody may have deleted it

    def _write(self, pointer: Pointer) -> None:
        pointer = replace(pointer, time=datetime.now(timezone.utc).isoformat(timespec='seconds'))
        self.store.put(pointer_key(self.name), (json.dumps(asdict(pointer), indent=1) + '\n').encode())
        self._pointer = pointer


def send_file(store: Store, name: str, file: str, path: Path, record: FileRecord) -> None:
    """Upload a file of a save. Runs on: any rank.

    Raises:
        DamagedError: It does not match the manifest, so it is not uploaded.
        StoreError: It was not stored.
    """
    with errors_naming(path):
        nbytes, found = file_size_and_crc32(path)
    if (nbytes, found) != (record.nbytes, record.crc32):
        raise DamagedError(
            f'{path}: changed since the save: expected {record.nbytes} bytes with CRC-32 {to_hex(record.crc32)}, '
            f'found {nbytes} with {to_hex(found)}; it is not uploaded'
        )
    store.put_file(f'{name}/{file}', path)
