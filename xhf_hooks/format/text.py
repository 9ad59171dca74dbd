"""Formats what messages of several rooms contain: sizes, lists of names, errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from xhf_hooks.errors import XhfError

_UNITS = ('kB', 'MB', 'GB', 'TB', 'PB', 'EB')


def size_text(nbytes: int) -> str:
    """A size such as ``'17 bytes'``, ``'1.20 kB'`` or ``'340 GB'``, in powers of ten like ``max_shard_size``."""
    if nbytes < 1000:
        return f'{nbytes} bytes'
    size, unit = nbytes / 1000, 0
    while size >= 999.5 and unit + 1 < len(_UNITS):
        size, unit = size / 1000, unit + 1
    return f'{size:.2f} {_UNITS[unit]}' if size < 10 else f'{size:.3g} {_UNITS[unit]}'


def counted(n: int, noun: str) -> str:
    """A count such as ``'1 tensor'`` or ``'2,000 tensors'``."""
    return f'{n:,} {noun}{"" if n == 1 else "s"}'


def some(names: Sequence[str], shown: int = 3) -> str:
    """The first few names and the number of the others."""
    names = [name[:120] for name in names]
    return ', '.join(names[:shown]) + (f' and {len(names) - shown} more' if len(names) > shown else '')


def error_text(error: BaseException, most: int = 200) -> str:
    """The kind of an error and what a library says in it, in one line."""
    return ' '.join(f'{type(error).__name__}: {error}'.split())[:most]


@contextmanager
def refused_as(kind: type[XhfError], what: str, remedy: str = '') -> Iterator[None]:
    """Whatever a library raises in the block becomes an error of ours, in one line: their classes raise anything.

    Args:
        what: What failed, where.
        remedy: The remedy, unless the error itself shows that custom code has to be allowed.
    """
    try:
        yield
    except (XhfError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        if 'trust_remote_code' in str(error):
            what = f'add --trust-remote-code if you trust the code that comes with this model: {what}'
            remedy = ''
        raise kind(f'{what} ({error_text(error)}){remedy and "; "}{remedy}') from None


def engine_text(manifest_fields: Mapping[str, Any]) -> str:
    """The engine that wrote a save or a checkpoint, such as ``'deepspeed ZeRO-3, 8 ranks'``."""
    stage, n_ranks = manifest_fields.get('zero_stage'), manifest_fields.get('world_size')
    engine = str(manifest_fields.get('engine')) + ('' if stage is None else f' ZeRO-{stage}')
    return engine if n_ranks is None else f'{engine}, {counted(n_ranks, "rank")}'
