"""Finds the checkpoint that a path means, by the names of its files alone."""

from __future__ import annotations

from pathlib import Path

from xhf_hooks.sources.checkpoint.records import FoundCheckpoint


def find_checkpoint(path: str | Path) -> FoundCheckpoint:
    """The checkpoint at ``path``: a work folder, a tag folder, a folder around one, or a file.

    Raises:
        CheckpointError: There is none, or a rank's file is missing by its number.
    """
    raise NotImplementedError
