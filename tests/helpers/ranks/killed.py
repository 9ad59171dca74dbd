"""Ranks that a test kills, forked from the server of `tests.helpers.ranks.launch`."""

import contextlib
import faulthandler
import os
from collections.abc import Iterator
from multiprocessing import Process
from pathlib import Path

import torch
import torch.distributed as dist

from tests.helpers.ranks.launch import HANG_SECS

WORLD_SIZE = 2


@contextlib.contextmanager
def ending(ranks: list[Process], what: object) -> Iterator[None]:
    """The block starts `ranks` and kills some; after it, the others must end by themselves.

    Raises:
        AssertionError: A rank hangs.
    """
    try:
        yield
        for rank in ranks:
            rank.join(HANG_SECS)
        assert not any(rank.is_alive() for rank in ranks), f'{what}: a survivor hangs'
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def join_group(rank: int, store: str | Path) -> None:
    """Join the others by a file store; if this rank hangs later, it prints where. Runs on: all ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    faulthandler.dump_traceback_later(HANG_SECS / 2)
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=WORLD_SIZE)
