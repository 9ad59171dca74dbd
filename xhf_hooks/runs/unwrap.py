"""The trained model without its wrappers: those of engines, DDP, DataParallel, FSDP1 and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from xhf_hooks.sources import open_wrapper


@dataclass(frozen=True)
class Unwrapped:
    """A trained model without its wrappers.

    Attributes:
        model: The module that the exporter knows: its class, its config and the names of its tensors.
        root: The module whose tensors the source reads: the outermost FSDP1 wrapper, which owns them; or EMAHook's
            averaged copy of the model; otherwise the model.
        manifest_fields: Fields of the manifest.
        engine: The training engine's wrapper, or its optimizer, where a trainer shows nothing else of the engine; None
            without either. By it the source refuses ``dtype='float32'`` where it cannot read the engine's fp32 masters.
        run_config: The config of the run, from which exporters read what they need; empty without one.
    """

    model: nn.Module
    root: nn.Module
    manifest_fields: dict[str, Any] = field(default_factory=lambda: {'engine': 'torch'})
    engine: Any | None = None
    run_config: Mapping[str, Any] = field(default_factory=dict)


def unwrap(model: Any, is_wrapper: Callable[[Any], bool] = lambda model: False) -> Unwrapped:
    """Remove the wrappers of training engines, DDP, FSDP1 and torch.compile, nested in any order.

    Args:
        is_wrapper: Tells more wrappers, which hold the model as ``module``.

    Raises:
        InstalledError: The engine is older than the oldest version that works.
    """
    # Here, since it takes half a second, and the converter does without
    from torch.distributed.fsdp import FullyShardedDataParallel

    manifest_fields: dict[str, Any] = {'engine': 'torch'}
    root: nn.Module | None = None
    engine: Any | None = None
    while True:
        opened = open_wrapper(model)
        if opened is not None:
            engine, (model, manifest_fields) = model, opened
        elif isinstance(model, FullyShardedDataParallel):
            root, model = root or model, model.module
        elif isinstance(model, (DataParallel, DistributedDataParallel)) or is_wrapper(model):
            model = model.module
        elif isinstance(getattr(model, '_orig_mod', None), nn.Module):
            model = model._orig_mod
        else:
            return Unwrapped(model, root or model, manifest_fields, engine)
