"""The measured ways to save: their names. Does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

FLOOR = 'floor: one process writes as many bytes'
FLOOR_ALL = 'floor: all processes write as many bytes together'
XTUNER = "XTuner's hook: consolidate, save_pretrained"
ACCELERATE = 'Accelerate: get_state_dict, save_pretrained'
DCP = "PyTorch DCP: save FSDP2's shards, then merge them"
META = "Meta's torch_checkpointing: save FSDP2's shards, then merge them"
#: Who writes what.
WRITERS = ('positional', 'parallel', 'stream', 'gather')
OURS = 'xhf_hooks '
SYNC = 'xhf_hooks positional, training waits'
ASYNC = 'xhf_hooks positional, async'
NO_SAVE = 'no save'
UPLOAD = 'upload_to, all ranks'
UPLOAD_BOTO3 = "rank 0 uploads the folder with boto3's transfer manager"
FLAT, HSDP = ', FSDP2', ', HSDP'
FSYNC = ', with fsync'
AS_THE_HOOK, NO_FSYNC = f'{FSYNC}, as the hook', ', without fsync'
BUCKET_NBYTES = 128 * 10**6


def ways_of(what: str) -> list[str]:
    """The ways that a benchmark of saves can measure, in the order of its table: what is on the disk comes first."""
    if what == 'hsdp':
        return [f'{OURS}{writer}{kind}' for writer in WRITERS for kind in (FLAT, HSDP)]
    floors = [f'{floor}{fsync}' for fsync in (FSYNC, '') for floor in (FLOOR, FLOOR_ALL)]
    ours = [f'{OURS}{writer}{fsync}' for fsync in (AS_THE_HOOK, NO_FSYNC) for writer in WRITERS]
    return [*floors, *ours, XTUNER, ACCELERATE, DCP, META]


def choose(ways: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Ways whose names contain one of the wanted words, ignoring case."""
    for words in wanted:
        if not any(words.lower() in way.lower() for way in ways):
            sys.exit(f'--ways {words!r}: expected a part of one of these names:\n' + '\n'.join(ways))
    return [way for way in ways if any(words.lower() in way.lower() for words in wanted)]
