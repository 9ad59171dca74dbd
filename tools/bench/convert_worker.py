"""Makes the input of ``tools/bench.py convert``: a ZeRO-3 checkpoint like those of XTuner runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:  # importing it prints a warning
    import deepspeed

#: Elements to change at once: a temporary tensor as large as a rank's fp32 master weights would not fit.
CHUNK = 2**24
TAG = 'iter_1.pth'


class Trained(nn.Module):
    """The names that XTuner's SupervisedFinetune gives its parameters."""

    def __init__(self, llm: nn.Module) -> None:
        super().__init__()
        self.llm = llm

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.llm(**batch)


def bench_checkpoint(
    engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], _: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Save a checkpoint and the config of its base model. Runs on: all ranks.

    Returns:
        The shapes of the base model's tensors.
    """
    for group in engine.optimizer.fp32_partitioned_groups_flat:
        for chunk in group.data.split(CHUNK):
            chunk += 1e-4 * torch.randn_like(chunk)  # fp32 master weights that bf16 cannot represent
    if job['optimizer'] == 'AdamW':  # one step creates its states
        ids = torch.arange(16).reshape(1, 16)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(job['folder'], tag=TAG)
    if dist.get_rank() == 0:
        engine.module.llm.config.save_pretrained(Path(job['folder'], 'base'))
    return {'shapes': {name: list(p.ds_shape) for name, p in engine.module.llm.named_parameters()}}
