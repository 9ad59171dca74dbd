"""What is found out about a run before its first step, whatever trains it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from xhf_hooks.commit.checkpoint_folder import CheckpointFolder, new_name, sweep_dead_runs
from xhf_hooks.distributed.collective import Collective
from xhf_hooks.distributed.shared_filesystem import is_shared
from xhf_hooks.errors import OptionError, TargetError
from xhf_hooks.registry import WRITERS

_Log = logging.Logger | logging.LoggerAdapter


@dataclass(frozen=True)
class Unwrapped:
    """A trained model without what training has put around it.

    Attributes:
        model: The bare module, with the names of its own.
        root: What the source reads: the outermost FSDP1 wrapper, which holds tensors of its own, or the model.
        facts: What the manifest says of it.
        engine: DeepSpeed's, if it was given.
    """

    model: nn.Module
    root: nn.Module
    facts: dict[str, Any] = field(default_factory=lambda: {'engine': 'torch'})
    engine: Any | None = None


def unwrap(model: Any, other_wrappers: tuple[type, ...] = ()) -> Unwrapped:
    """Look into a DeepSpeed engine, DDP, FSDP1 or torch.compile, around each other or alone.

    Args:
        other_wrappers: Classes that hold the model as ``module``, too.
    """
    wrappers: tuple[type[Any], ...] = (DataParallel, DistributedDataParallel, *other_wrappers)
    facts: dict[str, Any] = {'engine': 'torch'}
    root: nn.Module | None = None
    engine: Any | None = None
    while True:
        if hasattr(model, 'zero_optimization_stage'):
            facts = {'engine': 'deepspeed', 'zero_stage': model.zero_optimization_stage()}
            engine, model = model, model.module
        elif isinstance(model, FullyShardedDataParallel):
            root, model = root or model, model.module
        elif isinstance(model, wrappers):
            model = model.module
        elif isinstance(getattr(model, '_orig_mod', None), nn.Module):
            model = model._orig_mod
        else:
            return Unwrapped(model, root or model, facts, engine)


def refuse_unreadable_masters(engine_or_optimizer: Any) -> None:
    """Raise where DeepSpeed gives the masters of other parameters (0.19.6, ``_link_all_hp_params``).

    Args:
        engine_or_optimizer: DeepSpeed's engine or its optimizer, or what wraps that; others are fine.

    Raises:
        OptionError: It does.
    """
    optimizer = getattr(engine_or_optimizer, 'optimizer', None)
    if any(getattr(found, 'round_robin_gradients', False) is True for found in (engine_or_optimizer, optimizer)):
        raise OptionError('dtype', "no 'float32' with round_robin_gradients, which misnames the masters", 'float32')


def choose_writer(log: _Log, option: str, final: Path, collective: Collective) -> str:
    """What the option ``writer`` comes to on the file system of ``final``. Runs on: all ranks."""
    wanted = 'positional' if option == 'auto' else option
    if not WRITERS.get(wanted).all_ranks or is_shared(new_name(final, 'shared'), collective):
        return wanted
    log.warning(
        f'not all ranks see {final.parent}, so rank 0 writes: the writer is stream, not {wanted}. '
        f'Set out_dir to a folder on a shared file system to let every rank write'
    )
    return 'stream'


def claim_targets(
    log: _Log, folders: Sequence[CheckpointFolder], nbytes: int, base_dir: str, *, sweep: Path | None = None
) -> None:
    """Make sure that saves of ``nbytes`` can go there. Runs on: rank 0.

    Args:
        folders: The newest save's, then those of the best.
        sweep: Clear what killed runs left in other timestamps of this work_dir.

    Raises:
        TargetError: They cannot.
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
                log.info(f'cleared what a killed run left: {path}')
    free = newest.require_room(nbytes)
    copies = newest.max_keep + 1  # the kept ones, and the next while it is written
    if newest.max_keep > 0 and free < copies * nbytes:
        log.warning(
            f'{newest.final.parent} has {free / 1e9:.2f} GB free; keeping {newest.max_keep} '
            f'and writing the next needs {copies * nbytes / 1e9:.2f} GB'
        )
