"""Ranks that a test kills while they live, off the server of `tests.helpers.ranks`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing import Process
from pathlib import Path

from tests.helpers.ranks import HANG_SECS

WORLD_SIZE = 2


@contextlib.contextmanager
def ending(ranks: list[Process], what: object) -> Iterator[None]:
    """The block starts `ranks`, and kills some; when it ends, the others have to end by themselves.

    Raises:
        AssertionError: One hangs.
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
    """In a rank: meet the others at a file. If it hangs afterwards, it says where."""
    import faulthandler

    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    faulthandler.dump_traceback_later(HANG_SECS / 2)
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=WORLD_SIZE)
