"""Chooses the writer of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from xhf_hooks.distributed.collective import Collective
from xhf_hooks.distributed.shared_filesystem import is_shared
from xhf_hooks.errors import OptionError
from xhf_hooks.registry import STORE_WRITERS, WRITERS

#: Value of the option ``writer`` to the name of the writer for stores.
_STORE_WRITERS = {'auto': 'store', 'parallel': 'store', 'stream': 'store_from_rank0'}


def choose_store_writer(option: str) -> str:
    """Resolve the option ``writer`` if the output goes to an object store.

    Raises:
        OptionError: The writer supports only files.
    """
    if option not in _STORE_WRITERS:
        raise OptionError('writer', f'one of {tuple(_STORE_WRITERS)} when out_dir is a URL', option)
    return _STORE_WRITERS[option]


def writer_named(name: str) -> type[Any]:
    """The class that :func:`choose_store_writer` or :func:`choose_writer` has chosen."""
    return (STORE_WRITERS if name in STORE_WRITERS.module_dict else WRITERS).get(name)


def choose_writer(log: logging.Logger | logging.LoggerAdapter, option: str, probe: Path, collective: Collective) -> str:
    """Resolve the option ``writer`` for the file system of the output folder. Runs on: all ranks.

    Args:
        probe: Path of a test file beside the output folder, with a name that was never used before.
    """
    wanted = 'positional' if option == 'auto' else option
    if not WRITERS.get(wanted).all_ranks or is_shared(probe, collective):
        return wanted
    log.warning(
        f'not all ranks see {probe.parent}, so rank 0 writes: the writer is stream, not {wanted}. '
        f'To let every rank write, set out_dir to a folder on a shared file system'
    )
    return 'stream'
