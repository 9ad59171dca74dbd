"""DeepSpeed engines with tiny models, and saves of them, for real ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.helpers.runs.tiny_checkpoint import iteration
from tests.helpers.runs.zero_config import zero_config
from xhf_hooks.options import RunOptions, SaveOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.run import Run
from xhf_hooks.runs.run_info import RunInfo
from xhf_hooks.runs.save import Save
from xhf_hooks.runs.save_context import SaveContext
from xhf_hooks.runs.telemetry import RunLog
from xhf_hooks.runs.unwrap import unwrap

if TYPE_CHECKING:
    import deepspeed


def zero_engine(
    model: nn.Module,
    stage: int,
    *,
    bf16: bool = True,
    two_groups: bool = False,
    without: str | None = None,
    sections: Mapping[str, Any] | None = None,
    mpu: Any = None,
    **zero: Any,
) -> deepspeed.DeepSpeedEngine:
    """A training engine.

    Args:
        two_groups: Put matrices and vectors into two parameter groups, as trainers do for weight decay.
        without: The optimizer has no parameters with this in their names, but they need gradients.
        mpu: What knows the process groups, if DeepSpeed does not make them.
        sections: Like ``zero``, an argument of :func:`tests.helpers.runs.zero_config.zero_config`.
    """
    import deepspeed

    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    trained = [parameter for name, parameter in named if without is None or without not in name]
    if two_groups:
        trained = [{'params': [p for p in trained if (p.ndim > 1) == matrices]} for matrices in (True, False)]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    config = zero_config(stage, bf16=bf16, sections=sections, **zero)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    return engine


def train_one_step(engine: deepspeed.DeepSpeedEngine) -> None:
    """With 8 tokens that are the same on each rank."""
    tokens = torch.arange(8).reshape(1, -1)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


class Saver:
    """Saves of a model without a run: no lock, no log, no end. Runs on: all ranks.

    Args:
        options: ``writer``, ``in_background``, and those of SaveOptions.
    """

    def __init__(self, model: nn.Module, collective: Collective, **options: Any) -> None:
        trained = {n: options.pop(n) for n in ('run_config', 'manifest_fields') if n in options}
        strategy = WriteStrategy(options.pop('writer', 'stream'))
        made = SaveOptions(async_save=options.pop('in_background', False), **options)
        log = RunLog(logging.getLogger('test'), 'saver')
        unwrapped = replace(unwrap(model), **trained)
        self._last = ExitStack()
        self.context = SaveContext.open(unwrapped, made, collective, log, self._last.callback, strategy=strategy)

    @property
    def plan(self) -> SavePlan:
        """The plan of the next save, if the model does not change."""
        return self.context.plan

    def save(self, target: CheckpointFolder, step: Step) -> CommittedCheckpoint:
        """Make a save in the foreground."""
        return Save.begin(self.context, target, step).write_and_commit()

    def start(self, target: CheckpointFolder, step: Step) -> Future[CommittedCheckpoint]:
        """Begin a save in the background."""
        return Save.begin(self.context, target, step).copy_and_continue(lambda committed, error: None)

    def close(self) -> None:
        """End the threads. No save may be in flight."""
        self._last.close()


def open_run(
    model: nn.Module,
    folder: Path,
    logger: logging.Logger | None = None,
    *,
    trainer: object | None = None,
    collective: Collective | None = None,
    **options: Any,
) -> Run:
    """The saves of a run with these RunOptions. Runs on: all ranks."""
    info = RunInfo(unwrap(model), folder, schedule='now', trainer=trainer)
    log = RunLog(logger or logging.getLogger('test'), 'test')
    return Run.open(info, RunOptions(**options), log, collective=collective)


def names_read(plan: SavePlan) -> set[str]:
    """Names of the tensors that a save reads to send or gather."""
    sent = {portion.read.name for at_once in plan.rounds for portion in at_once.portions}
    return sent | {spec.name for group in plan.gathered for spec in group.reads}


def save_folder(model: nn.Module, final: Path, **options: Any) -> tuple[SavePlan, CommittedCheckpoint]:
    """Save like the hook, without a runner. Runs on: all ranks."""
    collective = Collective.connect(timeout_secs=600)
    in_background = options.get('in_background', False)
    saver = Saver(model, collective, **{'bucket_size': 20_000, **options})
    plan = saver.plan
    folder = CheckpointFolder(final, max_keep=1)
    with collective.stage('claim'):
        if collective.rank == 0:
            folder.lock_and_recover()
    try:
        if not in_background:
            return plan, saver.save(folder, iteration(1))
        return plan, saver.start(folder, iteration(1)).result()
    finally:
        folder.unlock()
        saver.close()
        collective.close()
