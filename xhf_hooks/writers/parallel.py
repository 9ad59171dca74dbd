"""Every rank writes a part of what is gathered, so a save uses every rank's way to the disk."""

from __future__ import annotations

from xhf_hooks.registry import WRITERS
from xhf_hooks.writers.stream import StreamWriter


@WRITERS.register_module(name='parallel')
class ParallelWriter(StreamWriter):
    """Whole tensors, each written by one rank: its own files where there are enough of them (planning/planner.py)."""

    all_ranks = True
