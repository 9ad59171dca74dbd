"""Ranks write whole files, of which the others send them their slices: each file has one writer."""

from __future__ import annotations

from xhf_hooks.registry import WRITERS
from xhf_hooks.writers.stream import StreamWriter


@WRITERS.register_module(name='parallel')
class ParallelWriter(StreamWriter):
    """For storage where several writers of one file hinder each other: object stores, Lustre stripes, NFS.

    No more ranks write than there are files; a smaller ``max_shard_size`` makes more (planning/planner.py).
    """

    all_ranks = True
