"""How ranks find each other in the store of their process group, before they are connected.

Keys in that store may be of an earlier attempt: torchrun's store outlives a restart, and a file outlives everything. So
each rendezvous has a name that was never used before, and a rank believes only an answer to its own random word.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from xhf_hooks.errors import RankLostError

#: A rank that has waited this long logs which ranks are missing.
WARN_AFTER_SECS = 30.0
#: The first waiting rank allows the others this long to register before it reports which ranks are missing.
_REGISTER_SECS = 2.0
_LEAST_PAUSE_SECS, _MOST_PAUSE_SECS = 0.0005, 0.2


def find_store(prefix: str) -> dist.Store | None:
    """A part of the key-value store of the process group, which outlives connections; None if there is none (MPI)."""
    try:
        return dist.PrefixStore(prefix, _get_default_store())
    except (AttributeError, ValueError):
        return None


def wait_for_all_ranks(store: Any, rank: int, world_size: int, timeout_secs: float) -> str:
    """Wait until all ranks are here: one of them may have been evaluating for an hour. Runs on: all ranks.

    Args:
        store: A store of torch, of these ranks alone.

    Returns:
        The name of this rendezvous, the same on all ranks.

    Raises:
        RankLostError: Some ranks have not come in time; the message names them. Or the store is gone.
    """
    word = uuid.uuid4().hex
    try:
        store.set(f'here/{rank}', word)
        if rank == 0:
            return _receive_all(store, word, world_size, timeout_secs)
        return _answer(store, rank, word, timeout_secs)
    except RuntimeError as error:  # the rank that hosts it, mostly rank 0, has died
        raise RankLostError(f'rank {rank} lost contact with the other ranks before a save: {error}') from error


def register_waiting_rank(store: Any, rank: int, world_size: int) -> None:
    """Note in the store that this rank waits; the first one to do so logs which ranks have not come.

    Args:
        store: A store of torch for this one wait.
    """
    store.set(f'{rank}', '')
    if store.add('first', 1) == 1:
        time.sleep(_REGISTER_SECS)
        _warn_of_missing_ranks(rank, [each for each in range(world_size) if not store_has(store, f'{each}')])


def _warn_of_missing_ranks(rank: int, missing: Collection[int]) -> None:
    """Log which ranks have not come."""
    logging.getLogger('xhf_hooks').warning(
        f'rank {rank} waits for {_named(missing)}, which did not reach this save so far: all ranks must make each '
        f'save, even those that write nothing'
    )


def _receive_all(store: Any, name: str, world_size: int, timeout_secs: float) -> str:
    """Answer each rank's word with the name of the rendezvous, and wait until all ranks repeat it. Runs on: rank 0."""
    missing, answered = dict.fromkeys(range(1, world_size)), dict.fromkeys(range(1, world_size), b'')

    def are_here() -> bool:
        for rank in [*missing]:
            if store_has(store, f'here/{rank}') and (word := store.get(f'here/{rank}')) != answered[rank]:
                answered[rank] = word  # perhaps of an earlier attempt; then another one will come
                store.set(f'answer/{word.decode()}', name)
            if store_has(store, f'{name}/{rank}'):
                del missing[rank]
        return not missing

    _wait(are_here, 0, missing, timeout_secs, may_warn=lambda: True)
    store.set(f'{name}/all', '')
    store.set('last', name)
    return name


def _answer(store: Any, rank: int, word: str, timeout_secs: float) -> str:
    """Wait for the name of the rendezvous, repeat it, and wait until all have. Runs on: other ranks than rank 0."""

    def is_first() -> bool:
        last = store.get('last').decode() if store_has(store, 'last') else ''
        return bool(store.add(f'missed since {last}', 1) == 1)

    _wait(lambda: store_has(store, f'answer/{word}'), rank, [0], timeout_secs, may_warn=is_first)
    name: str = store.get(f'answer/{word}').decode()
    store.set(f'{name}/{rank}', '')
    # Rank 0 names those that are missing
    _wait(lambda: store_has(store, f'{name}/all'), rank, [], timeout_secs, may_warn=lambda: False)
    return name


def _wait(
    is_over: Callable[[], bool],
    rank: int,
    missing: Collection[int],
    timeout_secs: float,
    *,
    may_warn: Callable[[], bool],
) -> None:
    began, pause_secs, has_warned = time.monotonic(), _LEAST_PAUSE_SECS, False
    while not is_over():
        waited_secs = time.monotonic() - began
        if waited_secs > timeout_secs:
            raise RankLostError(
                f'rank {rank}: {_named(missing)} have not reached this save within {timeout_secs:.0f} s: they died, or '
                f'did not make it; all ranks must'
            )
        if waited_secs > WARN_AFTER_SECS and not has_warned:
            has_warned = True
            if may_warn():
                _warn_of_missing_ranks(rank, missing)
        time.sleep(pause_secs)
        pause_secs = min(2 * pause_secs, _MOST_PAUSE_SECS)


def _named(ranks: Collection[int]) -> str:
    """Ranks as text."""
    listed = ', '.join(map(str, [*ranks][:8]))
    more = f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''
    return f'ranks {listed}{more}' if ranks else 'other ranks'


def store_has(store: Any, key: str) -> bool:
    """Whether somebody has set the key. A prefixed store of torch 2.1 cannot be asked, but waited for."""
    if hasattr(store, 'check'):
        return bool(store.check([key]))
    try:
        store.wait([key], timedelta(milliseconds=1))
    except RuntimeError:
        return False
    return True
