"""Locks a name under a URL for one run, by an object that its holder keeps rewriting. Runs on: rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from typing import Any, ClassVar
from weakref import WeakSet

from xhf_hooks.errors import StoreError
from xhf_hooks.stores.store import Store


class StoreLock:
    """The object ``<name>.lock``. A store does not drop the lock of a dead run, so the holder sends heartbeats.

    Attributes:
        beat_secs: Interval of the heartbeat.
        lifeless_secs: A run on another host without a heartbeat for this long, by the store's clock, counts as dead.
        settle_secs: Wait before the lock counts as taken: of two runs that start at once, the last writer has it.
    """

    beat_secs = 20.0
    lifeless_secs = 900.0
    settle_secs = 0.5

    #: The locks of this process. A lock with this process id that is not among them is of another container.
    _held: ClassVar[WeakSet[StoreLock]] = WeakSet()

    def __init__(self, store: Store, name: str) -> None:
        self._store, self.key = store, f'{name}.lock'
        self._run = uuid.uuid4().hex
        self._process = 0
        self._released = threading.Event()
        self._beating: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            StoreError: Another run holds it, or the store cannot be used.
        """
        found = self._read()
        if found is not None and self._is_alive(found):
            self._refuse(found)
        self._write(0)
        time.sleep(self.settle_secs)
        found = self._read()
        if found is None or found.get('run') != self._run:
            self._refuse(found or {})
        self._process = os.getpid()
        StoreLock._held.add(self)
        self._released = threading.Event()
        self._beating = threading.Thread(target=self._beat, args=(self._released,), name='xhf-store-lock', daemon=True)
        self._beating.start()

    def require(self) -> None:
        """Check that this run still holds the lock. Called before something is published.

        Raises:
            StoreError: Another run considered this one dead and has taken the lock.
        """
        found = self._read()
        if found is None or found.get('run') != self._run:
            self._refuse(found or {})

    def release(self) -> None:
        """Release the lock. Never raises: a lock that cannot be deleted counts as dead for the next run."""
        if self._process != os.getpid():
            return
        self._process = 0
        self._released.set()
        StoreLock._held.discard(self)
        self._beating.join()  # or its last heartbeat could follow the deletion
        with contextlib.suppress(StoreError):
            found = self._read()
            if found is not None and found.get('run') == self._run:
                self._store.delete([self.key])

    def _refuse(self, found: dict[str, Any]) -> None:
        holder = f'process {found.get("process")} on {found.get("host")}' if found else 'a run that removed the lock'
        raise StoreError(
            f'{self._store.url}/{self.key}: in use by {holder}; set {self._store.option} to another place. If that '
            f'run is dead, delete this object'
        )

    def _is_alive(self, found: dict[str, Any]) -> bool:
        if found.get('host') == socket.gethostname():
            process = found.get('process')
            if process == os.getpid():
                return any(
                    lock._run == found.get('run') and lock._process == process for lock in tuple(StoreLock._held)
                )
            return isinstance(process, int) and _is_running(process)
        return not self._is_lifeless() and self._shows_life(found)

    def _is_lifeless(self) -> bool:
        probe = f'{self.key}.clock-{uuid.uuid4().hex[:8]}'
        self._store.put(probe, b'')
        written, now = self._store.info(self.key), self._store.info(probe)
        self._store.delete([probe])
        if written is None or now is None or written.changed is None or now.changed is None:
            return False
        return (now.changed - written.changed).total_seconds() > self.lifeless_secs

    def _shows_life(self, found: dict[str, Any]) -> bool:
        deadline = time.monotonic() + 2.5 * self.beat_secs
        while time.monotonic() < deadline:
            time.sleep(self.beat_secs / 10)
            if self._read() != found:
                return True
        return False

    def _beat(self, released: threading.Event) -> None:
        number = 0
        while not released.wait(self.beat_secs):
            number += 1
            with contextlib.suppress(StoreError):  # unreachable: try again at the next heartbeat
                found = self._read()
                if found is None or found.get('run') != self._run:
                    return  # taken by another run; require() raises
                self._write(number)

    def _write(self, beat: int) -> None:
        content = {'run': self._run, 'host': socket.gethostname(), 'process': os.getpid(), 'beat': beat}
        self._store.put(self.key, json.dumps(content).encode())

    def _read(self) -> dict[str, Any] | None:
        data = self._store.get(self.key)
        if data is None:
            return None
        with contextlib.suppress(ValueError):
            content = json.loads(data)
            if isinstance(content, dict):
                return content
        return {}


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True
