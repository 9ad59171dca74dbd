"""Sources of tensors."""

from __future__ import annotations

from typing import Any

from torch import nn

from xhf_hooks.registry import SOURCES
from xhf_hooks.sources.base import Source
from xhf_hooks.sources.fsdp import Fsdp1Source, Fsdp2Source
from xhf_hooks.sources.parallelism import AutoTpSource, refuse_other_parallelism
from xhf_hooks.sources.whole_tensors import WholeTensorsSource
from xhf_hooks.sources.zero3 import Zero3Source

__all__ = ['AutoTpSource', 'Fsdp1Source', 'Fsdp2Source', 'Source', 'WholeTensorsSource', 'Zero3Source', 'source_for']

#: This package's own, in the order in which they are asked whether they accept a model, after registered ones.
BUILT_IN: tuple[type[Source], ...] = (Zero3Source, AutoTpSource, Fsdp1Source, Fsdp2Source, WholeTensorsSource)


def source_for(model: nn.Module) -> Source:
    """The source for a live model: the first that accepts it (:mod:`xhf_hooks.registry`). Runs on: all ranks.

    Raises:
        ModelError: It is split in a way that no source can read.
    """
    for registered in SOURCES.last_first():
        if registered.accepts(model):
            return registered.of(model)
    refuse_other_parallelism(model)
    return next(built_in for built_in in BUILT_IN if built_in.accepts(model)).of(model)


def open_wrapper(wrapper: Any) -> tuple[Any, dict[str, Any]] | None:
    """What the wrapper of some engine holds (:meth:`.Source.open_wrapper`); None if no source knows it."""
    found = (source.open_wrapper(wrapper) for source in (*SOURCES.last_first(), *BUILT_IN))
    return next((opened for opened in found if opened is not None), None)
