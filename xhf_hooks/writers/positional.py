"""Every rank writes its own slices at their places in the files: no gather, no copy, no network."""

from __future__ import annotations

from xhf_hooks.registry import WRITERS
from xhf_hooks.writers.stream import StreamWriter


@WRITERS.register_module(name='positional')
class PositionalWriter(StreamWriter):
    """Gathers only tensors that must be complete before they are written: merged ones, or those on NVMe."""

    all_ranks = True
    writes_local_shards = True
    receives_local_shards = False
