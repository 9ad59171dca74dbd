"""Reads a CheckpointSource into plain tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from xhf_hooks.offline.checkpoint.source import CheckpointSource
    from xhf_hooks.sources.stored_tensors import StoredTensor


def open_checkpoint(path: Path) -> CheckpointSource:
    from xhf_hooks.offline.checkpoint.source import CheckpointSource

    return CheckpointSource.open(path)


def read_all(source: CheckpointSource, *, from_master: bool = False) -> dict[str, torch.Tensor]:
    """Every tensor under each of its names, in state-dict order, each read in two parts split at an odd offset."""
    return read_tensors(source.tensors.values(), from_master)


def read_tensors(stored: Iterable[StoredTensor], from_master: bool = False) -> dict[str, torch.Tensor]:
    import torch

    from xhf_hooks.format.dtypes import TORCH_DTYPES

    tensors: dict[str, torch.Tensor] = {}
    for one in stored:
        dtype = 'F32' if from_master and one.spec.has_master else one.dtype
        tensor = torch.empty(one.shape, dtype=TORCH_DTYPES[dtype])
        flat, cut = tensor.view(-1), tensor.numel() // 3
        for start, end in ((0, cut), (cut, tensor.numel())):
            one.read_into(start, flat[start:end], from_master=from_master)
        tensors.update(dict.fromkeys((one.name, *one.aliases), tensor))
    return tensors
