"""All ranks gather whole tensors and rank 0 writes them; works with any engine that can gather."""

from __future__ import annotations

from xhf_hooks.registry import WRITERS
from xhf_hooks.writers.stream import StreamWriter


@WRITERS.register_module(name='gather')
class GatherWriter(StreamWriter):
    """For engines whose partitions cannot be read: every rank receives every tensor, but only rank 0 keeps it."""

    receives_local_shards = False
