"""Which writer a run uses."""

from __future__ import annotations

import logging
from pathlib import Path

from xhf_hooks.distributed.collective import Collective
from xhf_hooks.distributed.shared_filesystem import is_shared
from xhf_hooks.registry import WRITERS


def choose_writer(log: logging.Logger | logging.LoggerAdapter, option: str, probe: Path, collective: Collective) -> str:
    """Resolve the option ``writer`` for the file system of the output folder. Runs on: all ranks.

    Args:
        probe: A file beside the output folder, whose name was never used before; written and removed.
    """
    wanted = 'positional' if option == 'auto' else option
    if not WRITERS.get(wanted).all_ranks or is_shared(probe, collective):
        return wanted
    log.warning(
        f'not all ranks see {probe.parent}, so rank 0 writes: the writer is stream, not {wanted}. '
        f'Set out_dir to a folder on a shared file system to let every rank write'
    )
    return 'stream'
