"""Sources of tensors. Importing this package registers the built-in ones, the most specific last."""

from __future__ import annotations

from torch import nn

from xhf_hooks.registry import SOURCES
from xhf_hooks.sources.base import Source
from xhf_hooks.sources.fsdp import Fsdp1Source, Fsdp2Source
from xhf_hooks.sources.parallelism import AutoTpSource, refuse_other_parallelism
from xhf_hooks.sources.whole_tensors import WholeTensorsSource
from xhf_hooks.sources.zero3 import Zero3Source

__all__ = ['AutoTpSource', 'Fsdp1Source', 'Fsdp2Source', 'Source', 'WholeTensorsSource', 'Zero3Source', 'source_for']


def source_for(model: nn.Module) -> Source:
    """The source for a live model: the last registered one that accepts it. Runs on: all ranks.

    Raises:
        ModelError: It is split in a way that no source can read.
    """
    refuse_other_parallelism(model)
    last_first = reversed(SOURCES.module_dict.values())
    return next(cls for cls in last_first if cls.accepts(model))(model)
