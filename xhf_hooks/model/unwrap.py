"""The trained model without what training has put around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel


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
