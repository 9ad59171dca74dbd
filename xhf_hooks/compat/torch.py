"""Process groups and devices of torch 2.1 to 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; 0 and 1 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def new_gloo_group(connect_timeout: timedelta, timeout: timedelta, *, prefix: str) -> dist.ProcessGroup:
    """Create a gloo group of all ranks. Runs on: all ranks.

    A new group's time-out also applies while it looks up its ranks in the store. Since 2.3 torch can change it
    afterwards, but not under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, where it wraps the group. There and in older versions
    of torch, ranks that never come are waited for as long as ``timeout``.

    Args:
        connect_timeout: How long the ranks may take to connect.
        timeout: How long a rank waits for the other ranks in each later operation.
        prefix: Prefix of the ranks' keys in the store of the default group. It must be new: torch's own prefix is a
            count, and in torchrun's store, which outlives a restart, ranks would find the addresses of dead ones.

    Raises:
        RuntimeError: A rank did not connect in time.
    """
    set_timeout = getattr(distributed_c10d, '_set_pg_timeout', None)  # since torch 2.3
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        set_timeout = None  # torch's wrapper, and the group inside it that checks each call, keep their first time-out
    with _without_bound_device(), _store_with(prefix):
        group = dist.new_group(backend='gloo', timeout=timeout if set_timeout is None else connect_timeout)
    if set_timeout is not None:
        set_timeout(timeout, group)
    return group


def spread_maximum(number: torch.Tensor, group: dist.ProcessGroup, timeout: timedelta, tag: int) -> None:
    """Set the number to the largest of all ranks in log2(N) steps; gloo's ring takes 2(N-1). Runs on: all ranks.

    In each step every rank sends its maximum to a rank that is twice as far away as in the step before (dissemination).
    A maximum may be counted twice; a sum may not.

    Args:
        tag: Keeps these messages apart from other ones between the same ranks.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    distance, received = 1, torch.empty_like(number)
    while distance < world_size:
        ahead, behind = (rank + distance) % world_size, (rank - distance) % world_size
        for work in (dist.isend(number.clone(), ahead, group, tag), dist.irecv(received, behind, group, tag)):
            work.wait(timeout)
        torch.maximum(number, received, out=number)
        distance *= 2


@contextmanager
def _store_with(prefix: str) -> Iterator[None]:
    """Inside, new groups use the store of the default group under a prefix (``new_group``, distributed_c10d.py)."""
    groups, default = distributed_c10d._world.pg_map, dist.group.WORLD
    backend, store = groups[default]
    if store is None:  # of MPI
        yield
        return
    groups[default] = (backend, dist.PrefixStore(prefix, store))
    try:
        yield
    finally:
        groups[default] = (backend, store)


@contextmanager
def _without_bound_device() -> Iterator[None]:
    """Inside, the default group is bound to no device, as a new group would be then, too (since torch 2.3).

    gloo has no backend for a device unless that is CUDA's.
    """
    default = dist.group.WORLD
    bound = getattr(default, 'bound_device_id', None)
    if bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def device_module(device: torch.device) -> Any:
    """The module for a kind of device, such as ``torch.cuda``: ``torch.get_device_module``, which 2.1 to 2.3 lack."""
    find = getattr(torch, 'get_device_module', None)
    return getattr(torch, device.type) if find is None else find(device)
