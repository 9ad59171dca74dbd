"""Publishes saves under a URL: each save has its own prefix, its manifest is written last, then the pointer moves.

    hf_model.json                    the pointer: names the newest save; the only object that is ever replaced
    hf_model.lock                    one run at a time
    hf_model_iter_500/...            a save; xhf_manifest.json is its last object
    hf_model_iter_500/.xhf_writing   marks a save that is being written or deleted

The pointer always names a complete save. The mark ``.xhf_writing`` identifies leftovers of a killed run. Except for
saves that the pointer lists, nothing without this mark is ever deleted.
"""

from __future__ import annotations

import json
import queue
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from xhf_hooks.errors import StoreError
from xhf_hooks.stores.store import PROBE, ObjectInfo, Store
from xhf_hooks.stores.store_lock import StoreLock

MANIFEST_NAME = 'xhf_manifest.json'
_WRITING = '.xhf_writing'
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Pointer:
    """The content of the pointer.

    Attributes:
        newest: Prefix of the newest save, without a slash.
        saves: Prefixes from the oldest to the newest. Older ones may no longer exist.
        step: Unit and number of the newest step.
    """

    newest: str
    saves: tuple[str, ...]
    step: Mapping[str, Any]

    def as_bytes(self) -> bytes:
        content = {'format_version': _FORMAT_VERSION, 'newest': self.newest, 'step': self.step, 'saves': self.saves}
        return (json.dumps(content, indent=1) + '\n').encode()


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
        pointer = Pointer(content['newest'], tuple(content['saves']), content['step'])
        ours = _pattern(name)
        if content['format_version'] == _FORMAT_VERSION and all(map(ours.fullmatch, (pointer.newest, *pointer.saves))):
            return pointer
    except (ValueError, KeyError, TypeError):
        pass
    raise StoreError(
        f'{store.url}/{pointer_key(name)}: not written by this package, or by a newer version; move it away, or set '
        f'{store.option} to another place'
    )


def take_name(name: str, taken: set[str]) -> str:
    """The name, or the first free one of ``name_2``, ``name_3``, ...; it is added to ``taken``."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f'{name}_{number}'
    taken.add(free)
    return free


def require_answer(store: Store, secs: float = 60.0) -> None:
    """Write, read, list and remove a small object within a time limit, since libraries retry for minutes.

    Raises:
        StoreError: One of these failed or took too long.
    """
    outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            store.require_usable()
            outcome.put(None)
        except Exception as error:
            outcome.put(error)

    threading.Thread(target=ask, name='xhf-store-probe', daemon=True).start()
    try:
        error = outcome.get(timeout=secs)
    except queue.Empty:
        error = StoreError(f'{store.url}: does not answer within {secs:g} s; check {store.option}')
    if error is not None:
        raise error


class Publication:
    """The saves of one name under one URL. Runs on: rank 0 unless stated otherwise, one thread at a time.

    Args:
        name: A name such as ``hf_model``.
        max_keep: How many saves to keep, including the newest; -1 keeps all.

    Attributes:
        probe_secs: A test object of this age was left by a killed run; those of live ranks are younger.
    """

    probe_secs = 600.0

    def __init__(self, store: Store, name: str, max_keep: int) -> None:
        self.store, self.name, self.max_keep = store, name, max_keep
        self._lock = StoreLock(store, name)
        self._saves: list[str] = []
        self._taken: set[str] = set()
        self._in_use: set[str] = set()  # readers remove from it at any time
        self._is_deletion_due = False
        self._in_doubt: str | None = None  # the pointer may name it: the outcome of that request is unknown

    def claim(self) -> None:
        """Before training, check that the place can be used, lock it, and clean up after killed runs.

        Raises:
            StoreError: It cannot be used, or another run uses it.
        """
        require_answer(self.store)
        self._lock.acquire()
        try:
            self._recover()
        except BaseException:
            self.release()
            raise

    def new_prefix(self, label: str) -> str:
        """A prefix that was never used before, for a label such as ``iter_500``. Sends no request."""
        return take_name(f'{self.name}_{label}', self._taken)

    def begin(self, prefix: str) -> None:
        """Mark the prefix as being written. Runs on: every rank, before its first object of this save."""
        self.store.put(f'{prefix}/{_WRITING}', b'')

    def publish(self, prefix: str, manifest: bytes, step: Mapping[str, Any]) -> None:
        """Make a save whose other objects are all written the newest; only then delete older ones.

        Raises:
            StoreError: A step failed; call it again.
        """
        self._lock.require()
        in_doubt = self._in_doubt
        if not self.is_newest(prefix):
            self.store.put(f'{prefix}/{MANIFEST_NAME}', manifest)
            saves = [*(save for save in self._saves if save != prefix), prefix]
            self._in_doubt = prefix
            self.store.put(pointer_key(self.name), Pointer(prefix, tuple(saves), step).as_bytes())
            self._saves, self._in_doubt = saves, None
        self.store.delete([f'{prefix}/{_WRITING}'])
        if in_doubt is not None:
            self.abandon(in_doubt)
        self._delete_outdated()

    def is_newest(self, prefix: str) -> bool:
        """Whether the pointer names this save as the newest."""
        return bool(self._saves) and self._saves[-1] == prefix

    def abandon(self, prefix: str) -> None:
        """Delete what was written of a save that will not be published, unless the pointer may name it."""
        if prefix not in self._saves and prefix != self._in_doubt:
            self._delete(prefix)

    def keep(self, prefix: str) -> StoredSave:
        """A published save, which is not deleted while it is in use. No save may be published meanwhile."""
        self._in_use.add(prefix)
        return StoredSave(f'{self.store.url}/{prefix}', partial(self._in_use.discard, prefix))

    def delete_released(self) -> None:
        """Delete outdated saves that were in use when a newer one was published.

        Raises:
            StoreError: A step failed; the next run deletes them.
        """
        if self._is_deletion_due:
            self._lock.require()
            self._delete_outdated()

    def release(self) -> None:
        """Release the lock, so that another run can use the place."""
        self._lock.release()

    def _recover(self) -> None:
        pointer = read_pointer(self.store, self.name)
        listed = () if pointer is None else pointer.saves
        objects: dict[str, set[str]] = {}
        there = self.store.list()
        self._delete_old_probes(there)
        for key in there:
            prefix, slash, rest = key.partition('/')
            if slash and _pattern(self.name).fullmatch(prefix):
                objects.setdefault(prefix, set()).add(rest)
        for upload, key in self.store.unfinished_uploads(f'{self.name}_').items():
            if _pattern(self.name).fullmatch(key.partition('/')[0]):
                self.store.abort(upload, key)
        for prefix, names in objects.items():
            if _WRITING in names and prefix in listed and MANIFEST_NAME in names:
                self.store.delete([f'{prefix}/{_WRITING}'])
            elif _WRITING in names:
                self._delete(prefix)
        self._taken = {*objects, *listed}
        self._saves = [prefix for prefix in listed if MANIFEST_NAME in objects.get(prefix, ())]
        if pointer is not None and pointer.newest not in self._saves:
            raise StoreError(
                f'{self.store.url}/{pointer.newest}: the newest save lacks its {MANIFEST_NAME}; restore '
                f'it, or delete {pointer_key(self.name)}'
            )
        self._delete_outdated()

    def _delete_old_probes(self, there: Mapping[str, ObjectInfo]) -> None:
        lock = there.get(self._lock.key)
        now = None if lock is None else lock.changed  # now, by the store's clock: the lock was just written
        probes = {key: info.changed for key, info in there.items() if key.startswith((PROBE, f'{self._lock.key}.'))}
        if now is not None:
            self.store.delete(
                [key for key, made in probes.items() if made and (now - made).total_seconds() > self.probe_secs]
            )

    def _delete_outdated(self) -> None:
        if self.max_keep == -1:
            return
        self._is_deletion_due = False
        for prefix in self._saves[: -self.max_keep]:
            if prefix in self._in_use:
                self._is_deletion_due = True
                continue
            self._delete(prefix)
            self._saves.remove(prefix)

    def _delete(self, prefix: str) -> None:
        """Write the mark first and delete it last, so that the next run finishes an interrupted deletion."""
        for upload, key in self.store.unfinished_uploads(f'{prefix}/').items():
            self.store.abort(upload, key)
        mark, manifest = f'{prefix}/{_WRITING}', f'{prefix}/{MANIFEST_NAME}'
        self.begin(prefix)
        self.store.delete([manifest])
        self.store.delete([key for key in self.store.list(f'{prefix}/') if key not in (mark, manifest)])
        self.store.delete([mark])


def _pattern(name: str) -> re.Pattern[str]:
    """Matches the prefixes of saves. ``_2`` is the second save of a step."""
    return re.compile(rf'{re.escape(name)}_(iter|epoch)_\d+(_\d+)?')
