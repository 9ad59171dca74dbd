"""Objects under one URL. fsspec finds the library, and the library finds its credentials.

A request that fails, or gets no answer in time, is repeated a few times within seconds, so none stops a save for long.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from xhf_hooks.errors import StoreError
from xhf_hooks.places.hub_bucket import HubBucket, is_bucket_url

_S3 = ('s3', 's3a')
#: s3fs repeats requests by itself; so many times, and boto not at all.
_S3_RETRIES = 2
#: Options of botocore's Config; those that the installed one lacks are left out. Some servers send checksums of
#: something else, and some refuse the headers with checksums that botocore sends since 1.36.
_S3_CONFIG = {
    'connect_timeout': 5,
    'read_timeout': 60,
    'retries': {'total_max_attempts': 1, 'mode': 'standard'},
    'response_checksum_validation': 'when_required',
    'request_checksum_calculation': 'when_required',
}
#: Parts of a file that are sent at once. s3fs would hold ten parts of 50 MB in memory.
_S3_PARTS, _S3_PART_NBYTES, _S3_MOST_PARTS = 4, 16 * 2**20, 10_000
#: Protocols with which a file is visible while it is being written: small objects get a temporary name first.
_WITH_FILES = {'file', 'local', 'hdfs', 'arrow_hdfs', 'webhdfs', 'sftp', 'ssh', 'smb'}
#: Those of them that keep folders whose last file was removed, and whose ``rmdir`` removes nothing but an empty folder.
_WITH_FOLDERS = {'file', 'local', 'sftp', 'ssh', 'smb'}
#: A folder of one object, which a rank writes and deletes before training; a random number follows.
_PROBE = '.xhf_probe'

_SECRET_IN_URL = re.compile(r'(?<=://)[^/\s@]*@|(?<=[^\s?])\?[^\s\'"<>]+=[^\s\'"<>]*')


def without_secrets(text: str) -> str:
    """The text without user names, passwords and queries in URLs."""
    return _SECRET_IN_URL.sub('', text)


def _protocol(url: str) -> str:
    return url.partition('://')[0].lower()


class Store:
    """Objects under one URL, by keys relative to it, with slashes.

    Args:
        url: The URL.
        files: The file system of fsspec that has it, or what has the same methods.
        root: The path of the URL in this file system.
        warn: Called at once when a request fails and will be repeated.

    Attributes:
        answer_secs: Deadline of a request to a library with an asynchronous interface (of S3, GCS and Azure).
        least_rate: The slowest accepted upload of a file, in bytes per second; its deadline is later accordingly.
        pauses_secs: Pauses before a request is sent again.
        patience_secs: A request that fails after this time is not sent again.
    """

    answer_secs = 20.0
    least_rate = 250_000
    pauses_secs: tuple[float, ...] = (0.5, 1.0, 2.0)
    patience_secs = 30.0

    def __init__(self, url: str, files: Any, root: str, warn: Callable[[str], object]) -> None:
        self.url, self._warn = url, warn
        self._fs, self._root = files, root.rstrip('/')
        self._random = random.Random()  # training draws from the module's, perhaps together with other ranks
        protocol = _protocol(url)
        self._is_s3, self._has_files = protocol in _S3, protocol in _WITH_FILES
        self._has_folders = protocol in _WITH_FOLDERS

    @classmethod
    def open(
        cls,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        warn: Callable[[str], object] = lambda said: None,
    ) -> Store:
        """Open a store. Nothing is sent yet, except that some libraries look for credentials.

        Args:
            url: A URL such as ``'s3://bucket/run'``, with any protocol that fsspec supports; or of a bucket of the Hub.
            storage_options: Arguments for fsspec's file system, such as ``endpoint_url``; of HfApi for a bucket.
            warn: Called at once when a request fails and will be repeated.

        Raises:
            StoreError: The library is missing, or refuses ``storage_options``.
        """
        import fsspec

        given = dict(storage_options or {})
        own: dict[str, Any] = {'use_listings_cache': False}
        try:
            if is_bucket_url(url):
                bucket = HubBucket.open(url, given)
                return cls(url, bucket, bucket.root, warn)
            if _protocol(url) in _S3:
                from botocore.config import Config

                known = {name: value for name, value in _S3_CONFIG.items() if name in Config.OPTION_DEFAULTS}
                own['config_kwargs'] = {**known, **given.get('config_kwargs', {})}
                own['max_concurrency'] = _S3_PARTS
            # From fsspec's cache, which keeps it: s3fs closes a session badly when it is freed in the thread of a loop
            files, root = fsspec.core.url_to_fs(url, **{**given, **own})
        except ImportError as error:
            raise StoreError(f'{url}: {error} (docs/object-stores.md), or set upload_to to another place') from None
        except Exception as error:  # of any type: each store's library raises its own
            said = without_secrets(f'{type(error).__name__}: {error}')
            raise StoreError(f'{url}: cannot be opened: {said}; check upload_to and storage_options') from None
        if _protocol(url) in _S3:
            files.retries = _S3_RETRIES
        return cls(url, files, root, warn)

    def put(self, key: str, data: bytes) -> None:
        """Write a small object atomically: readers see the old or the new one."""
        path = self._path(key)
        if not self._has_files:
            self._ask('write', key, 'pipe_file', path, data)
            return
        temporary = f'{path}.{uuid.uuid4().hex[:12]}'
        self._ask('write', key, 'makedirs', self._fs._parent(path), exist_ok=True)
        self._ask('write', key, 'pipe_file', temporary, data)
        self._ask('write', key, 'mv', temporary, path)

    def put_file(self, key: str, path: Path) -> None:
        """Upload a file; the library sends large ones in parts."""
        nbytes, how = path.stat().st_size, dict[str, Any]()
        if self._is_s3:
            how['chunksize'] = max(_S3_PART_NBYTES, -(-nbytes // _S3_MOST_PARTS))
        if self._has_files:
            self._ask('write', key, 'makedirs', self._fs._parent(self._path(key)), exist_ok=True)
        secs = self.answer_secs + nbytes / self.least_rate
        self._ask('write', key, 'put_file', str(path), self._path(key), secs=secs, **how)

    def get(self, key: str) -> bytes | None:
        """Bytes of an object; None if there is no such object."""
        return self._ask('read', key, 'cat_file', self._path(key))

    def sizes(self, folder: str) -> dict[str, int]:
        """Sizes in bytes of the objects whose keys begin with a folder's name and a slash, by the rest of the key."""
        path = self._path(folder)
        self._fs.invalidate_cache()
        found = self._ask('list', folder, 'find', path, detail=True)
        # rclone answers with a folder's own name where it has removed the last object
        files = {key[len(path) :]: int(entry['size']) for key, entry in found.items() if entry['type'] == 'file'}
        return {key[1:]: nbytes for key, nbytes in sorted(files.items()) if key.startswith('/') and key != '/'}

    def delete(self, keys: Collection[str]) -> None:
        """Remove those of the objects that exist, and folders that become empty, also that of the URL."""
        for key in keys:
            self._ask('delete', key, 'rm_file', self._path(key))
        folders = {str(folder) for key in keys for folder in PurePosixPath(key).parents}
        for folder in sorted(folders, reverse=True) if self._has_folders else ():  # that of the URL, '.', comes last
            with contextlib.suppress(Exception):  # of any type, from the library: the folder is not empty
                self._fs.rmdir(self._root if folder == '.' else self._path(folder))

    def require_usable(self, *, deletes: bool = True) -> None:
        """Make each kind of request that uploads make, on a small object: credentials may allow some of them only.

        Args:
            deletes: Whether uploads will delete. If not, the store need not allow it.

        Raises:
            StoreError: One of these did not work.
        """
        folder = f'{_PROBE}_{uuid.uuid4().hex[:12]}'
        key = f'{folder}/object'
        self.put(key, b'written to see whether that works; may be deleted')
        self.get(key)
        self.sizes(folder)
        try:
            self.delete([key])
        except StoreError as error:
            if deletes:
                raise
            self._warn(f'{error}. Nothing that this run uploads will be deleted, so it goes on; {key} stays there')

    def _path(self, key: str) -> str:
        return f'{self._root}/{key}'

    def _ask(self, what: str, key: str, method: str, *args: Any, secs: float | None = None, **how: Any) -> Any:
        """Call a method of the file system, a few times if it fails.

        Args:
            what: What it does, for messages.
            secs: Deadline of each call; None: ``answer_secs``.

        Returns:
            None if there is nothing to read or to delete.

        Raises:
            StoreError: It did not succeed; says where, without secrets.
        """
        began, pauses_secs = time.monotonic(), iter(self.pauses_secs)
        while True:
            try:
                return self._call(method, *args, secs=secs or self.answer_secs, **how)
            except Exception as error:  # of any type: each store's library raises its own
                if isinstance(error, FileNotFoundError) and what in ('read', 'delete'):
                    return None
                reason = without_secrets(f'{type(error).__name__}: {error}')
            said = f'{self.url}/{key}: cannot {what}: {reason}'
            pause_secs = next(pauses_secs, None)
            if pause_secs is None or time.monotonic() - began > self.patience_secs:
                hint = "the credentials where the store's library looks for them"
                raise StoreError(f'{said}. Check upload_to, storage_options, and {hint}')
            self._warn(f'will be tried again: {said}')
            time.sleep(pause_secs * self._random.uniform(0.5, 1.0))  # ranks begin at the same time

    def _call(self, method: str, *args: Any, secs: float, **how: Any) -> Any:
        from fsspec.asyn import sync
        from fsspec.exceptions import FSTimeoutError

        if not self._fs.async_impl:
            return getattr(self._fs, method)(*args, **how)
        try:
            return sync(self._fs.loop, getattr(self._fs, f'_{method}'), *args, timeout=secs, **how)
        except FSTimeoutError as error:  # from a time-out of the library, or none
            said = str(error.__cause__ or '') or f'the store does not answer within {secs:g} s'
            raise TimeoutError(said) from None
