"""Measures one save. Runs on: all ranks."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch.distributed as dist

from tests.helpers.checks.peak_sampler import sampled_memory
from xhf_hooks.sources.host_memory import return_freed_memory

#: struct tcp_info in linux/tcp.h: tcpi_bytes_sent and tcpi_bytes_retrans, since Linux 4.19.
_AT, _SENT_AND_SENT_AGAIN = 200, struct.Struct('QQ')


def measure(way: Callable[[Path], object], folder: Path, nbytes: int) -> dict[str, float]:
    """Seconds until all ranks are done, extra anonymous memory, and bytes sent between ranks.

    What is in the folder stays: a save replaces the one before it, as in a run.
    """
    gc.collect()
    return_freed_memory()  # or this run would reuse memory that the previous one freed, unnoticed
    dist.barrier()
    sent_before = _sent_nbytes()
    with sampled_memory() as meter:
        started = time.perf_counter()
        way(folder)
        dist.barrier()
        seconds = time.perf_counter() - started
    sent = _sent_nbytes() - sent_before
    # Without DCP's shards in a subfolder, from which it made these files
    written = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if written < nbytes:
        raise RuntimeError(f'{folder}: expected at least {nbytes} bytes, found {written}')
    found: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(found, (meter.peak_extra_nbytes, sent))
    peaks, all_sent = zip(*found, strict=True)
    return {
        'seconds': seconds,
        'peak_extra_mb': max(peaks) / 1e6,
        'peak_rank0_mb': peaks[0] / 1e6,
        'peak_others_mb': max(peaks[1:], default=0) / 1e6,
        'sent_mb': sum(all_sent) / 1e6,
    }


def clear(folder: Path, sync: bool = False) -> None:
    """Remove what was written; with ``sync``, also wait until nothing is on its way to the disk."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        if sync:
            os.sync()
    dist.barrier()


def _sent_nbytes() -> int:
    """Bytes sent over this process's open TCP connections, without headers, each byte once, as the kernel counts them.

    Gloo uses TCP even on one machine, and its connections stay open, so the difference between two calls is what was
    sent in between, whatever else the machine does. Shared memory is not counted.
    """
    total = 0
    for connection in psutil.Process().net_connections('tcp'):
        with socket.socket(fileno=os.dup(connection.fd)) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _AT + _SENT_AND_SENT_AGAIN.size)
        sent, sent_again = _SENT_AND_SENT_AGAIN.unpack_from(info, _AT)
        total += sent - sent_again
    return total
