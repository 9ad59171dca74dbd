"""What is found out about a run before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.model import is_model_wrapper
from torch import nn

from xhf_hooks.collective import Collective
from xhf_hooks.commit.staging import CheckpointFolder, sweep_dead_runs
from xhf_hooks.errors import OptionError, TargetError
from xhf_hooks.registry import WRITERS
from xhf_hooks.shared_folder import is_shared


def unwrap(model: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The bare module inside MMEngine's wrapper, DeepSpeed's engine or DDP, and what the manifest says of it."""
    facts: dict[str, Any] = {'engine': 'torch'}
    if is_model_wrapper(model):
        if hasattr(model, 'zero_optimization_stage'):
            facts = {'engine': 'deepspeed', 'zero_stage': model.zero_optimization_stage()}
        model = model.module
    return model, facts


def refuse_unreadable_masters(engine: Any) -> None:
    """Raise where DeepSpeed gives the masters of other parameters (0.19.6, ``_link_all_hp_params``).

    Raises:
        OptionError: It does.
    """
    if getattr(getattr(engine, 'optimizer', None), 'round_robin_gradients', False):
        raise OptionError('dtype', "no 'float32' with round_robin_gradients, which misnames the masters", 'float32')


def choose_writer(runner: Any, option: str, folder: Path, collective: Collective) -> str:
    """What the option ``writer`` comes to on this file system. Runs on: all ranks."""
    wanted = 'positional' if option == 'auto' else option
    if not WRITERS.get(wanted).all_ranks or is_shared(folder, collective):
        return wanted
    runner.logger.warning(
        f'HFCheckpointHook: not all ranks see {folder}, so rank 0 writes: the writer is stream, not {wanted}. '
        f'Set out_dir to a folder on a shared file system to let every rank write'
    )
    return 'stream'


def claim_targets(runner: Any, folders: Sequence[CheckpointFolder], nbytes: int, base_dir: str, *, sweep: bool) -> None:
    """Make sure that saves of ``nbytes`` can go there. Runs on: rank 0.

    Args:
        folders: The newest save's, then those of the best.
        sweep: Clear what killed runs left in other timestamps of the work_dir.

    Raises:
        TargetError: They cannot.
    """
    newest = folders[0]
    if base_dir and Path(base_dir).absolute() == newest.final:
        raise TargetError(f'{newest.final} is the base model that this run starts from; set out_dir elsewhere')
    for folder in folders:
        folder.claim()
        if sweep:
            for path in sweep_dead_runs(Path(runner.work_dir), folder.final.name):
                runner.logger.info(f'HFCheckpointHook: cleared what a killed run left: {path}')
    free = newest.require_room(nbytes)
    copies = newest.max_keep + 1  # the kept ones, and the next while it is written
    if newest.max_keep > 0 and free < copies * nbytes:
        runner.logger.warning(
            f'HFCheckpointHook: {newest.final.parent} has {free / 1e9:.2f} GB free; keeping {newest.max_keep} '
            f'and writing the next needs {copies * nbytes / 1e9:.2f} GB'
        )
