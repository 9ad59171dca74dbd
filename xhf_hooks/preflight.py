"""Checks before the first step of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xhf_hooks.commit.checkpoint_folder import sweep_dead_runs
from xhf_hooks.commit.target import SaveTarget
from xhf_hooks.errors import OptionError, TargetError

_Log = logging.Logger | logging.LoggerAdapter


def refuse_unreadable_fp32_masters(engine_or_optimizer: Any) -> None:
    """Raise if DeepSpeed returns the wrong parameters' fp32 master weights (0.19.6, ``_link_all_hp_params``).

    Args:
        engine_or_optimizer: DeepSpeed's engine or optimizer, a wrapper of it, or anything else.

    Raises:
        OptionError: It does so.
    """
    optimizer = getattr(engine_or_optimizer, 'optimizer', None)
    if any(getattr(found, 'round_robin_gradients', False) is True for found in (engine_or_optimizer, optimizer)):
        raise OptionError(
            'dtype', "no 'float32' with round_robin_gradients, which misnames the fp32 master weights", 'float32'
        )


def claim_targets(
    log: _Log, folders: Sequence[SaveTarget], nbytes: int, base_dir: str, *, sweep: Path | None = None
) -> None:
    """Claim the folders and check that saves of ``nbytes`` fit. Runs on: rank 0.

    Args:
        folders: The folder of the newest save, then those of the best.
        sweep: A work_dir; leftovers of killed runs under its other timestamps are removed.

    Raises:
        TargetError: A folder cannot be used, or the disk is too small.
    """
    newest = folders[0]
    if base_dir and Path(base_dir).absolute() == newest.final:
        raise TargetError(f'{newest.final} is the base model that this run starts from; set out_dir elsewhere')
    for folder in folders:
        folder.claim()
        for warning in folder.warnings:
            log.warning(warning)
        if sweep is not None:
            for path in sweep_dead_runs(sweep, folder.final.name):
                log.info(f'removed what a killed run left: {path}')
    free = newest.require_room(nbytes)
    copies = newest.max_keep + 1  # those that are kept, and the one being written
    if newest.max_keep > 0 and free is not None and free < copies * nbytes:
        log.warning(
            f'{newest.final.parent} has {free / 1e9:.2f} GB free; keeping {newest.max_keep} '
            f'and writing the next needs {copies * nbytes / 1e9:.2f} GB'
        )
