"""Saves in a store: each has its own prefix, and a pointer that moves last names the newest.

    hf_model.json                    the pointer: which save is the newest, which are complete, which are not
    hf_model.run                     the claim: which run saves here; each run writes it once, before training
    hf_model_iter_500/...            a save, under its prefix; xhf_manifest.json is its last object

The pointer lists the files of saves that are being written or deleted: after a kill, the next run deletes those.
Nothing else is listed, and nothing is deleted that the pointer or a manifest does not name.

Of two runs with one URL, the one that claimed last goes on, whatever the earlier one does meanwhile. The earlier one
fails with an error from its next save on. Few stores have conditional requests, so it may overwrite the pointer of the
later run, but only once: after each write of the pointer, before it sends or deletes a file, a run looks whether the
claim is still its own. From this and the order of requests follows:

- The later run reads the pointer after it has claimed. So it either reads what the earlier run has written, or the
  earlier run sees the claim and deletes nothing.
- The later run deletes nothing, not even what a killed run left, before it has published a save of its own. So the
  write that may still arrive names a save whose files are all there, and the later run builds on it.
- If that write arrives after the later run has published a save, the pointer names the save of the earlier run, which
  may be deleted, until the later run puts that right: with its next save, or at its end. Requests have deadlines, so
  this can happen only to a run that publishes within about a minute of its claim.
- Of runs that claim at the same time, the one whose claim the store keeps goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from xhf_hooks.errors import DamagedError, IncompleteError, StoreError
from xhf_hooks.format.checksum import file_size_and_crc32, to_hex
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.format.text import counted, some
from xhf_hooks.integrity.manifest import FileRecord, parse_manifest
from xhf_hooks.places.objects import Store
from xhf_hooks.places.retention import Retention
from xhf_hooks.system.files import errors_naming

T = TypeVar('T')
_FORMAT_VERSION = 2


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

    format_version: int = _FORMAT_VERSION
    newest: str | None = None
    saves: tuple[str, ...] = ()
    step: Mapping[str, Any] | None = None
    run: str = ''
    time: str = ''
    writing: str | None = None
    number: int = 0
    unfinished: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """Which run saves here, and since when (UTC)."""

    run: str
    time: str


def pointer_key(name: str) -> str:
    """The key of the pointer for saves of this name, such as ``hf_model``."""
    return f'{name}.json'


def claim_key(name: str) -> str:
    """The key of the claim for saves of this name."""
    return f'{name}.run'


def read_pointer(store: Store, name: str) -> Pointer | None:
    """Read the pointer; None if there is none yet.

    Raises:
        StoreError: The store cannot be read, or the object is not a pointer.
    """
    ours = re.compile(rf'{re.escape(name)}_(iter|epoch)_\d+(_\d+)?')

    def parse(content: dict[str, Any]) -> Pointer:
        pointer = Pointer(**{**content, 'saves': tuple(content['saves'])})
        prefixes = [*pointer.saves, *pointer.unfinished, *filter(None, (pointer.newest, pointer.writing))]
        files = [file for names in pointer.unfinished.values() for file in names]
        is_ours = all(map(ours.fullmatch, prefixes)) and not any('..' in file for file in files)
        if not is_ours or pointer.format_version != _FORMAT_VERSION:
            raise ValueError
        return pointer

    return _read_record(store, pointer_key(name), parse)


def read_claim(store: Store, name: str) -> Claim | None:
    """Read the claim; None if there is none.

    Raises:
        StoreError: The store cannot be read, or the object is not a claim.
    """
    return _read_record(store, claim_key(name), lambda content: Claim(**content))


def _read_record(store: Store, key: str, parse: Callable[[Any], T]) -> T | None:
    data = store.get(key)
    if data is None:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        return parse(json.loads(data))
    raise StoreError(
        f'{store.url}/{key}: not written by this package, or by a newer version; move it away, or set upload_to to '
        f'another place'
    )


def _as_json(record: Pointer | Claim) -> bytes:
    return (json.dumps(asdict(record), indent=1) + '\n').encode()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec='seconds')


class ReplacedError(StoreError):
    """Another run has taken the place."""


class StoredSaves:
    """The saves of one name under one URL. Runs on: rank 0, one thread at a time.

    Args:
        name: A name such as ``hf_model``.
        max_keep: How many saves to keep, including the newest; -1 keeps all.
        warn: Called at once when a request fails, and with what was found that is not ours.
        keep_every: As in :class:`.Retention`.

    Raises:
        StoreError: Every method raises it if a request fails or, once the place is claimed, another run has taken it.
    """

    def __init__(
        self,
        url: str,
        name: str,
        max_keep: int,
        options: Mapping[str, Any] | None = None,
        warn: Callable[[str], object] = lambda said: None,
        *,
        keep_every: int | None = None,
    ) -> None:
        self.url = url
        self.name = name
        self.retention = Retention(max_keep, keep_every)
        self.run = uuid.uuid4().hex
        self._options, self._warn = options, warn
        self._iterations: dict[str, int] = {}  # of saves, by prefix
        self._pointer = Pointer()  # as last read or written
        self._has_published = False
        self._taken: set[str] = set()  # not used again: an earlier run may still be writing there
        self._in_doubt: str | None = None  # the pointer may name it: the outcome of that request is unknown

    @cached_property
    def store(self) -> Store:
        """The connection of this process. Runs on: any rank."""
        return Store(self.url, self._options, warn=self._warn)

    def claim(self) -> None:
        """Before training, take over the place."""
        read_pointer(self.store, self.name)  # refuses what is foreign
        read_claim(self.store, self.name)
        self.store.put(claim_key(self.name), _as_json(Claim(self.run, _now())))
        self._pointer = read_pointer(self.store, self.name) or Pointer()

    def newest_manifest(self) -> bytes | None:
        """The manifest of the newest save, whoever made it; None if there is none."""
        pointer = read_pointer(self.store, self.name)
        if pointer is None or pointer.newest is None:
            return None
        return self.store.get(f'{pointer.newest}/{MANIFEST_NAME}')

    def begin(self, label: str, files: Collection[str], number: int = 0) -> str:
        """Take an unused prefix for a save, such as ``hf_model_iter_500``, and list its files in the pointer.

        Args:
            number: Which save of this run it is, for other ranks that read the pointer.
        """
        pointer, name = self._current(), f'{self.name}_{label}'
        names = itertools.chain([name], (f'{name}_{count}' for count in itertools.count(2)))
        self._taken |= {*pointer.saves, *pointer.unfinished}
        prefix = next(each for each in names if each not in self._taken and not self.store.sizes(each))
        self._taken.add(prefix)
        unfinished = {**pointer.unfinished, prefix: [*files, MANIFEST_NAME]}
        self._write(replace(pointer, writing=prefix, number=number, unfinished=unfinished))
        return prefix

    def missing(self, prefix: str, files: Mapping[str, FileRecord]) -> list[str]:
        """The files of a save that are not there with their sizes."""
        sizes = self.store.sizes(prefix)
        return [name for name, file in files.items() if sizes.get(name) != file.nbytes]

    def publish(self, prefix: str, manifest: bytes) -> None:
        """Make a save whose files are all there the newest one, and delete older ones.

        Raises:
            IncompleteError: A file is not there.
        """
        content = parse_manifest(manifest, prefix)
        try:
            if missing := self.missing(prefix, content.files):
                self._require_claim()
                raise IncompleteError(
                    f'{self.url}/{prefix}: the store does not have {counted(len(missing), "file")} with the right '
                    f'size, although it acknowledged them: {some(missing)}'
                )
            self.store.put(f'{prefix}/{MANIFEST_NAME}', manifest)
            pointer = self._current()
        except ReplacedError:  # the other run may have deleted this save before its last files were sent
            with contextlib.suppress(StoreError):
                self.store.delete([f'{prefix}/{name}' for name in (*content.files, MANIFEST_NAME)])
            raise
        step = {'unit': content.step.unit, 'number': content.step.number}
        unfinished = {key: names for key, names in pointer.unfinished.items() if key != prefix}
        saves = (*pointer.saves, prefix)
        pointer = replace(pointer, newest=prefix, saves=saves, step=step, writing=None, unfinished=unfinished)
        self._in_doubt = prefix
        self._write(self._without_outdated(pointer))
        self._in_doubt, self._has_published = None, True
        self._iterations[prefix] = content.step.iteration  # so that clean() need not read the manifest again
        try:
            self.clean()
        except StoreError as error:
            self._warn(f'the save is complete, but older objects were not all deleted: {error}')

    def clean(self) -> None:
        """Delete the files of older saves, and of those that were begun and not published.

        Does nothing before this run has published a save. What is left by an error, the next save or run deletes.
        """
        if not self._has_published:
            return
        due = {prefix: names for prefix, names in self._current().unfinished.items() if prefix != self._in_doubt}
        for prefix, files in due.items():
            self.store.delete([f'{prefix}/{name}' for name in files])
            if left := self.store.sizes(prefix):
                self._warn(
                    f'{self.url}/{prefix}: {counted(len(left), "object")} there did not come from this package '
                    f'and will stay: {some(sorted(left))}'
                )
        if due:
            found = self._current()
            self._write(replace(found, unfinished={p: names for p, names in found.unfinished.items() if p not in due}))

    def clean_at_end(self) -> None:
        """At the end of the run, :meth:`clean`. Never raises: the next run deletes the rest."""
        with contextlib.suppress(StoreError):
            self.clean()

    def _without_outdated(self, pointer: Pointer) -> Pointer:
        saved = [(prefix, self._iteration_of(prefix)) for prefix in reversed(pointer.saves)]
        old = self.retention.find_superfluous(saved)
        files = {save: self._files_of(save) for save in old}
        saves = tuple(save for save in pointer.saves if save not in old)
        return replace(pointer, saves=saves, unfinished={**pointer.unfinished, **files})

    def _files_of(self, prefix: str) -> list[str]:
        """The files that a save's manifest names: only those are deleted."""
        manifest = self.store.get(f'{prefix}/{MANIFEST_NAME}')
        with contextlib.suppress(DamagedError):
            return [*parse_manifest(manifest or b'', prefix).files, MANIFEST_NAME]
        return []

    def _iteration_of(self, prefix: str) -> int:
        """The number of iterations of a save; 0, of which none is kept for good, if its manifest is not there."""
        if self.retention.keep_every is None:
            return 0
        if prefix not in self._iterations:
            manifest = self.store.get(f'{prefix}/{MANIFEST_NAME}')
            self._iterations[prefix] = 0
            with contextlib.suppress(DamagedError):
                self._iterations[prefix] = parse_manifest(manifest or b'', prefix).step.iteration
        return self._iterations[prefix]

    def _require_claim(self) -> None:
        """Look whether another run has taken the place."""
        claim = read_claim(self.store, self.name)
        if claim is not None and claim.run != self.run:  # somebody may have deleted it
            raise ReplacedError(
                f'{self.url}/{claim_key(self.name)}: another run saves here since {claim.time}, so this run '
                f'does not any more; set upload_to to another place'
            )

    def _current(self) -> Pointer:
        """The pointer, with what this run has recorded in it even if an earlier run has overwritten that."""
        self._require_claim()
        found, known = read_pointer(self.store, self.name), self._pointer
        if found is None or found.run == self.run:  # somebody may have deleted it
            return found or known
        base = known if self._has_published else found
        of_other_run = {save: self._files_of(save) for save in found.saves if save not in base.saves}
        unfinished = {**of_other_run, **found.unfinished, **known.unfinished}
        unfinished = {prefix: files for prefix, files in unfinished.items() if prefix not in base.saves}
        pointer = replace(base, unfinished=unfinished)
        if self._has_published:
            self._write(pointer)
        return pointer

    def _write(self, pointer: Pointer) -> None:
        """Replace the pointer, then look whether another run has taken the place, and overwritten it or built on it."""
        pointer = replace(pointer, run=self.run, time=_now())
        self.store.put(pointer_key(self.name), _as_json(pointer))
        self._pointer = pointer
        self._require_claim()


def send_file(store: Store, prefix: str, name: str, path: Path, record: FileRecord) -> None:
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
    store.put_file(f'{prefix}/{name}', path)
