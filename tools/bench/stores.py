"""Launches the benchmark of object stores, ``upload``.

Each rank's uplink is throttled. The server is ``rclone serve s3`` on this machine, in memory. Ranks and server share
the processors, so with 8 ranks at 40 MB/s 2 cores are the limit, not the uplinks. The slowdown of training beside an
upload is measured with one rank and a slow uplink, which leave the server a core.

The server keeps no MD5 of an object, and would read the object again whenever a client asks about it. Real stores do
not, and with ``--etag-hash ''`` neither does this one. It still computes the MD5 of each part, as they do.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from bench.launch import run_worker
from tests.helpers.faults.s3_servers import s3_server

_SERVER_OPTIONS = ('--etag-hash', '')
#: The model that trains beside an upload, in billions, and the number of uploads.
_TRAINING_BILLIONS, _TRAINING_REPEATS = 0.05, 10


def measure(args: Namespace, n_ranks: int, billions: float) -> dict[str, Any]:
    """Uploads of one size of model by a number of ranks, and training beside an upload."""
    beside = _run('training', 1, _TRAINING_BILLIONS, args.training_uplink, _TRAINING_REPEATS, args.out)
    return {**_run('upload', n_ranks, billions, args.uplink, args.repeats, args.out), 'training': beside}


def _run(what: str, n_ranks: int, billions: float, uplink: int, repeats: int, out: Path) -> dict[str, Any]:
    memory = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None
    prefixes = [f'run{number}/hf_model_iter_1' for number in range(2 * repeats)]
    with (
        tempfile.TemporaryDirectory(dir=memory) as name,
        s3_server('rclone', Path(name), prefixes=prefixes, options=_SERVER_OPTIONS) as server,
    ):
        case = {'billions': billions, 'repeats': repeats, 'uplink_nbytes_per_sec': uplink * 10**6}
        job = {'what': what, **case, 'endpoint': server.url, 'objects': str(Path(name, 'objects'))}
        return {'ranks': n_ranks, **case, **run_worker(n_ranks, job, out)}
