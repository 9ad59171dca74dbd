"""Checkpoints on disk as a source: DeepSpeed folders and ``.pth`` files, read where they lie.

    found = find_checkpoint('work_dirs/run')      looks at names only
    source = CheckpointSource(found)              reads the pickles, restricted, and checks every file's size
    source.specs()                                as any source
    source.read_into('llm.lm_head.weight', 0, buffer, 'BF16', use_fp32_master=False)

Nothing in a checkpoint is executed (:mod:`.safe_pickle`), and DeepSpeed is not imported.
"""

from __future__ import annotations

from xhf_hooks.sources.checkpoint.find import find_checkpoint
from xhf_hooks.sources.checkpoint.found import FoundCheckpoint
from xhf_hooks.sources.checkpoint.source import CheckpointSource

__all__ = ['CheckpointSource', 'FoundCheckpoint', 'find_checkpoint']
