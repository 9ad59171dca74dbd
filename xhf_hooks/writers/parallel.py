"""Every rank writes whole tensors that the others send it, so a save uses every rank's way to the disk."""

from __future__ import annotations

from xhf_hooks.registry import WRITERS
from xhf_hooks.writers.stream import StreamWriter


@WRITERS.register_module(name='parallel')
class ParallelWriter(StreamWriter):
    """Each tensor is written by one rank: its own files where there are enough of them (planning/planner.py)."""

    all_ranks = True
