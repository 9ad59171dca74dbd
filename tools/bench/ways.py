"""The measured ways to save: their names. Does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

#: What separates a floor's name from the method, where several were measured; the fastest is the floor.
BY = ', by '
FLOOR = 'floor: one process writes as many bytes'
FLOOR_ALL = 'floor: all processes write as many bytes together'
FLOOR_SENT = 'floor: one process writes as many bytes, the others send it theirs'
FLOOR_FSYNC = 'floor: one process writes as many bytes, with fsync'
FLOOR_ALL_FSYNC = 'floor: all processes write as many bytes together, with fsync'
FLOOR_GATHER = 'floor: all_gather of as many bytes, nothing written'
XTUNER = "XTuner's hook: consolidate, save_pretrained"
ACCELERATE = 'Accelerate: get_state_dict, save_pretrained'
DCP = "PyTorch DCP: FSDP2's shards, consolidated on every rank"
#: Who writes what.
WRITERS = ('positional', 'parallel', 'stream', 'gather')
OURS = 'xhf_hooks '
SYNC = 'xhf_hooks positional, training waits'
ASYNC = 'xhf_hooks positional, async'
NO_SAVE = 'no save'
FLAT, HSDP = ', FSDP2', ', HSDP'
FSYNC_WORDS = {False: 'without fsync', True: 'with fsync, as the hook'}


def name_of_ours(writer: str, fsync: bool) -> str:
    """The name of the way that saves with a writer."""
    return f'{OURS}{writer}, {FSYNC_WORDS[fsync]}'


def ways_to_save(writers: Sequence[str]) -> list[str]:
    """Floors, peers, and each writer with and without fsync."""
    return [
        *(FLOOR, FLOOR_SENT, FLOOR_ALL, FLOOR_FSYNC, FLOOR_ALL_FSYNC, FLOOR_GATHER),
        XTUNER,
        ACCELERATE,
        DCP,
        *(name_of_ours(writer, fsync) for fsync in (False, True) for writer in writers),
    ]


def choose(ways: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Ways whose names contain one of the wanted words, ignoring case; all if none are given."""
    for words in wanted:
        if not any(words.lower() in way.lower() for way in ways):
            sys.exit(f'--ways {words!r}: expected a part of one of these names:\n' + '\n'.join(ways))
    return [way for way in ways if not wanted or any(words.lower() in way.lower() for words in wanted)]
