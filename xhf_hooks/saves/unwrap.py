"""The trained model without its wrappers: DeepSpeed's engine, DDP, DataParallel, FSDP1, torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


@dataclass(frozen=True)
class Unwrapped:
    """A trained model without its wrappers.

    Attributes:
        model: The module that the exporter knows: its class, its config and the names of its tensors.
        root: The module whose tensors the source reads: the outermost FSDP1 wrapper, which owns them; or EMAHook's
            averaged copy of the model; otherwise the model.
        manifest_fields: Fields of the manifest.
        engine: DeepSpeed's engine, or its optimizer (Trainer's callback gets no engine); None without DeepSpeed. By it
            ``dtype='float32'`` is refused where DeepSpeed keeps fp32 masters in a form that no source can read.
        run_config: The config of the run, from which exporters read what they need; empty without one.
    """

    model: nn.Module
    root: nn.Module
    manifest_fields: dict[str, Any] = field(default_factory=lambda: {'engine': 'torch'})
    engine: Any | None = None
    run_config: Mapping[str, Any] = field(default_factory=dict)


def unwrap(model: Any, other_wrappers: tuple[type, ...] = ()) -> Unwrapped:
    """Remove a DeepSpeed engine, DDP, FSDP1 and torch.compile, nested in any order.

    Args:
        other_wrappers: More classes that hold the model as ``module``.
    """
    # Here, since it takes half a second, and the converter does without
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrappers: tuple[type[Any], ...] = (DataParallel, DistributedDataParallel, *other_wrappers)
    manifest_fields: dict[str, Any] = {'engine': 'torch'}
    root: nn.Module | None = None
    engine: Any | None = None
    while True:
        if hasattr(model, 'zero_optimization_stage'):
            manifest_fields = {'engine': 'deepspeed', 'zero_stage': model.zero_optimization_stage()}
            engine, model = model, model.module
        elif isinstance(model, FullyShardedDataParallel):
            root, model = root or model, model.module
        elif isinstance(model, wrappers):
            model = model.module
        elif isinstance(getattr(model, '_orig_mod', None), nn.Module):
            model = model._orig_mod
        else:
            return Unwrapped(model, root or model, manifest_fields, engine)
