"""Each file has one owner, which writes it; the other ranks send their slices to the owner."""

from __future__ import annotations

from xhf_hooks.registry import WRITERS
from xhf_hooks.writers.stream import StreamWriter


@WRITERS.register_module(name='parallel')
class ParallelWriter(StreamWriter):
    """For storage where several writers of one file slow each other down: object stores, Lustre stripes, NFS.

    There are no more writers than files; a smaller ``max_shard_size`` gives more files (planning/planner.py).
    """

    all_ranks = True
