"""A storage bucket of the Hugging Face Hub: ``hf://buckets/OWNER/NAME``.

A bucket is an object store, which a repository is not: there, each write is a commit.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_URL = re.compile(r'hf://buckets/([^/]+/[^/]+)(/.*)?', re.IGNORECASE)


def is_bucket_url(url: str) -> bool:
    """Whether a URL is that of a bucket, or of a place in one."""
    return _URL.fullmatch(url) is not None


class HubBucket:
    """The objects of a bucket, by those methods of fsspec's file systems that :class:`.Store` calls.

    fsspec's own file system for ``hf://`` first writes a copy of each file into TMPDIR. ``HfApi.batch_bucket_files``
    sends a file from where it is, and of that only what the bucket does not have yet.

    Paths are ``OWNER/NAME/KEY``, as fsspec's.

    Args:
        api: The ``HfApi`` that sends requests.
        name: The bucket, as ``OWNER/NAME``.
        root: The path that the URL stands for.
    """

    async_impl = False  # to Store: methods are called as they are, and have the time limits of huggingface_hub

    def __init__(self, api: HfApi, name: str, root: str) -> None:
        self._api, self._bucket, self.root = api, name, root

    @classmethod
    def open(cls, url: str, arguments: Mapping[str, Any]) -> HubBucket:
        """Open a bucket. Nothing is sent yet.

        Args:
            url: The URL of the bucket, or of a place in it.
            arguments: Arguments for ``HfApi``, such as ``endpoint``.

        Raises:
            ImportError: The installed huggingface_hub has no buckets, or lacks a package that it sends files with.
        """
        import huggingface_hub

        if not hasattr(huggingface_hub.HfApi, 'batch_bucket_files'):
            raise ImportError(
                f'buckets of the Hub need huggingface_hub 1.5 or newer (HfApi.batch_bucket_files), and '
                f'{huggingface_hub.__version__} is installed'
            )
        if find_spec('hf_xet') is None:
            raise ImportError('buckets of the Hub need the package hf_xet')
        found = _URL.fullmatch(url)
        if found is None:
            raise ValueError('expected hf://buckets/OWNER/NAME')
        return cls(huggingface_hub.HfApi(**arguments), found[1], f'{found[1]}{found[2] or ""}'.rstrip('/'))

    def pipe_file(self, path: str, data: bytes) -> None:
        """Write an object; readers see the old or the new one."""
        with _without_progress_bars():
            self._api.batch_bucket_files(self._bucket, add=[(data, self._key(path))])

    def put_file(self, local: str, path: str) -> None:
        """Send a file."""
        with _without_progress_bars():
            self._api.batch_bucket_files(self._bucket, add=[(local, self._key(path))])

    def cat_file(self, path: str) -> bytes:
        """Read an object, which goes through a temporary file: only for small ones.

        Raises:
            FileNotFoundError: There is no such object.
        """
        infos = [*self._api.get_bucket_paths_info(self._bucket, [self._key(path)])]
        if not infos:
            raise FileNotFoundError(path)
        with tempfile.TemporaryDirectory(prefix='xhf_hooks_') as folder:
            local = Path(folder, 'object')
            with _without_progress_bars():
                self._api.download_bucket_files(self._bucket, [(infos[0], local)])
            return local.read_bytes()

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]:
        """The objects whose path begins with ``path``, with their sizes."""
        entries = self._api.list_bucket_tree(self._bucket, prefix=self._key(path), recursive=True)
        files = [entry for entry in entries if entry.type == 'file']
        return {f'{self._bucket}/{entry.path}': {'type': 'file', 'size': entry.size} for entry in files}

    def rm_file(self, path: str) -> None:
        """Remove an object if it is there."""
        try:
            self._api.batch_bucket_files(self._bucket, delete=[self._key(path)])
        except Exception:
            if [*self._api.get_bucket_paths_info(self._bucket, [self._key(path)])]:
                raise

    def invalidate_cache(self) -> None:
        """Nothing is cached."""

    def _key(self, path: str) -> str:
        return path.removeprefix(f'{self._bucket}/')


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep huggingface_hub from printing up to four progress bars for each object into the log of training.

    Its setting is one for the process, and afterwards as before. HF_HUB_DISABLE_PROGRESS_BARS=0 shows the bars.
    """
    from huggingface_hub import constants, utils

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or utils.are_progress_bars_disabled():
        yield
        return
    # By the name that the setting for all has there: without a name, settings of groups of bars would be lost
    utils.disable_progress_bars('_global')
    try:
        yield
    finally:
        utils.enable_progress_bars('_global')
