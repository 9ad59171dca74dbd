"""Writers put bytes into the staging folder. Importing this package registers the built-in ones."""

from __future__ import annotations

from xhf_hooks.writers.base import Writer
from xhf_hooks.writers.gather import GatherWriter
from xhf_hooks.writers.parallel import ParallelWriter
from xhf_hooks.writers.positional import PositionalWriter
from xhf_hooks.writers.store import StoreStreamWriter, StoreWriter
from xhf_hooks.writers.stream import StreamWriter

__all__ = [
    'GatherWriter',
    'ParallelWriter',
    'PositionalWriter',
    'StoreStreamWriter',
    'StoreWriter',
    'StreamWriter',
    'Writer',
]
