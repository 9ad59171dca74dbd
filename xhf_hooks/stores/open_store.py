"""Opens the store at a URL. fsspec finds the library, and the library finds its credentials."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from xhf_hooks.errors import OptionError, StoreError
from xhf_hooks.stores.secrets import has_secrets, without_secrets
from xhf_hooks.stores.store import Store

#: Protocol to the extra of this package that installs its library.
EXTRAS = {
    's3': 's3',
    's3a': 's3',
    'gs': 'gcs',
    'gcs': 'gcs',
    'az': 'azure',
    'abfs': 'azure',
    'abfss': 'azure',
    'adl': 'azure',
    'oss': 'oss',
}
_URL = re.compile(r'([a-z][a-z0-9+.-]*)://(.+)', re.IGNORECASE)
#: s3fs itself retries 5 times. This package compares checksums itself, since some servers answer a range request with
#: the checksum of the whole object.
_S3_CONFIG = {
    'connect_timeout': 10,
    'read_timeout': 60,
    'retries': {'total_max_attempts': 2, 'mode': 'standard'},
    'response_checksum_validation': 'when_required',
}


def is_url(place: object) -> bool:
    """Whether a place is the URL of a store rather than a folder."""
    return isinstance(place, str) and bool(_URL.fullmatch(place))


def checked_url(option: str, url: Any) -> str:
    """The URL without a final slash.

    Raises:
        OptionError: It is not a URL, or contains credentials.
    """
    match = _URL.fullmatch(url) if isinstance(url, str) else None
    if match is None:
        raise OptionError(option, "a URL such as 's3://bucket/run'", url)
    if has_secrets(url):
        expected = 'a URL without credentials and queries (docs/object-stores.md says where they go)'
        raise OptionError(option, expected, without_secrets(url))
    return url.rstrip('/')


def open_store(
    url: str,
    backend_args: Mapping[str, Any] | None = None,
    *,
    option: str = 'upload_to',
    prepare_thread: Callable[[], None] | None = None,
) -> Store:
    """The store at a URL. Nothing is sent yet, except that some libraries look for credentials.

    Args:
        url: A URL such as ``'s3://bucket/run'``, with any protocol that fsspec supports.
        backend_args: Arguments for fsspec's file system, such as ``endpoint_url``.
        option: The user's option that the URL comes from, for messages.
        prepare_thread: Called first in a new thread that does the I/O of such stores, for protocols whose I/O fsspec
            does in a thread. None: fsspec's own thread, which other code in this process may share.

    Raises:
        OptionError: It is not the URL of a store.
        StoreError: The library is missing, or refuses ``backend_args``.
    """
    import fsspec

    from xhf_hooks.stores.s3_store import S3Store

    url = checked_url(option, url)
    protocol = url.partition('://')[0]
    given = dict(backend_args or {})
    if protocol in ('s3', 's3a'):
        given['config_kwargs'] = {**_S3_CONFIG, **given.get('config_kwargs', {})}
    own: dict[str, Any] = {}
    try:
        if prepare_thread is not None and fsspec.get_filesystem_class(protocol).async_impl:
            own['loop'] = _loop(prepare_thread, os.getpid())
        file_system, root = fsspec.core.url_to_fs(
            url, **given, **own, use_listings_cache=False, skip_instance_cache=True
        )
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        how = f"pip install 'xhf_hooks[{extra}]'" if extra else f'install what fsspec needs for {protocol}://'
        raise StoreError(f'{url}: {error}; {how}, or set {option} to another place') from None
    except Exception as error:
        said = without_secrets(f'{type(error).__name__}: {error}', given)
        raise StoreError(f'{url}: cannot be opened: {said}; check {option} and backend_args') from None
    kind = Store
    if protocol in ('s3', 's3a'):
        kind = S3Store
        file_system.close_session = _in_given_loop(file_system.close_session)
    return kind(file_system, root, without_secrets(url), given, option)


def _in_given_loop(close_session: Callable[..., None]) -> Callable[..., None]:
    """Make s3fs close a session in the event loop that made it, and that it passes.

    s3fs closes it when the file system is freed. The garbage collector may do that in the thread of another loop. s3fs
    would then close it in that loop. That is not thread-safe, and asyncio reports a future "attached to a different
    loop".
    """

    def close(loop: asyncio.AbstractEventLoop, *session: Any) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running in (None, loop):
            close_session(loop, *session)
        else:
            loop.call_soon_threadsafe(close_session, loop, *session)

    return close


@functools.cache
def _loop(prepare_thread: Callable[[], None], process: int) -> asyncio.AbstractEventLoop:
    """An event loop in a separate thread, one for all stores of a process, like fsspec's own."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        prepare_thread()
        loop.run_forever()

    threading.Thread(target=run, name='store-io', daemon=True).start()
    return loop
