"""Every rank writes its own slices at their places in the files: no gather, no copy, no network."""

from __future__ import annotations

from xhf_hooks.registry import WRITERS
from xhf_hooks.writers.stream import StreamWriter


@WRITERS.register_module(name='positional')
class PositionalWriter(StreamWriter):
    """What must be whole before it can be written (merged, or on NVMe) is gathered and shared out."""

    all_ranks = True
    writes_local_shards = True
    receives_local_shards = False
