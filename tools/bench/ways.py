"""The measured ways to save: their names and rough costs. Does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

#: Separates a floor's name from the method that reaches it; the fastest method is the floor.
BY = ', by '
FLOOR = 'floor: one process writes as many bytes'
FLOOR_ALL = 'floor: all processes write as many bytes together'
FLOOR_SENT = 'floor: one process writes as many bytes, the others send it theirs'
FLOOR_FSYNC = 'floor: one process writes as many bytes, with fsync'
FLOOR_ALL_FSYNC = 'floor: all processes write as many bytes together, with fsync'
FLOOR_GATHER = 'floor: all_gather of as many bytes, nothing written'
SENDERS = ('gloo', 'sockets')
FLUSHERS = ('write, then fsync', 'sync_file_range', 'O_DIRECT')
XTUNER = "XTuner's hook: consolidate, save_pretrained"
DEEPSPEED = 'DeepSpeed: consolidate, torch.save'
ACCELERATE = 'Accelerate: get_state_dict, save_pretrained'
DCP_RANK0 = "PyTorch DCP: FSDP2's shards, consolidated on rank 0"
DCP_ALL = "PyTorch DCP: FSDP2's shards, consolidated on every rank"
#: Who writes what.
WRITERS = ('positional', 'parallel', 'stream', 'gather')
OURS = 'xhf_hooks '
SYNC = 'xhf_hooks positional, training waits'
ASYNC = 'xhf_hooks positional, async'
NO_SAVE = 'no save'
FSYNC_WORDS = {False: 'without fsync', True: 'with fsync, as the hook'}


@dataclass(frozen=True)
class Way:
    """One way to save.

    Attributes:
        secs_per_gb: Approximate, with two ranks on two shared cores, including the clean-up between runs; only for
            the estimate.
    """

    name: str
    secs_per_gb: float

    @property
    def writes(self) -> bool:
        return self.name != FLOOR_GATHER


def name_of_ours(writer: str, fsync: bool) -> str:
    """The name of the way that saves with a writer."""
    return f'{OURS}{writer}, {FSYNC_WORDS[fsync]}'


def ways_to_save(writers: Sequence[str]) -> list[Way]:
    """Floors, peers, and each writer with and without fsync."""
    return [
        Way(FLOOR, 0.6),
        *(Way(f'{FLOOR_SENT}{BY}{how}', 1.0) for how in SENDERS),
        Way(FLOOR_ALL, 0.5),
        *(Way(f'{FLOOR_FSYNC}{BY}{how}', 1.2) for how in FLUSHERS),
        *(Way(f'{FLOOR_ALL_FSYNC}{BY}{how}', 1.0) for how in FLUSHERS),
        Way(FLOOR_GATHER, 1.3),
        Way(XTUNER, 3.6),
        Way(DEEPSPEED, 3.6),
        Way(ACCELERATE, 3.4),
        Way(DCP_RANK0, 5.0),
        Way(DCP_ALL, 5.0),
        *(Way(name_of_ours(writer, fsync), 2.2) for fsync in (False, True) for writer in writers),
    ]


def choose(ways: Sequence[Way], wanted: Sequence[str]) -> list[Way]:
    """Ways whose names contain one of the wanted words, ignoring case; all if none are given."""
    for words in wanted:
        if not any(words.lower() in way.name.lower() for way in ways):
            sys.exit(f'--ways {words!r}: expected a part of one of these names:\n' + '\n'.join(w.name for w in ways))
    return [way for way in ways if not wanted or any(words.lower() in way.name.lower() for words in wanted)]
