"""``out_dir`` in a store against gathering, a local folder and its upload by rank 0; launches both ways.

Each rank's uplink is throttled. The server is ``rclone serve s3`` on this machine, in memory.
"""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from bench.arguments import add_billions, add_number, add_ranks
from bench.launch import MODELS, run_worker
from bench.upload import SERVER_OPTIONS
from tests.helpers.s3_servers import s3_server


def add_options(parser: ArgumentParser) -> None:
    add_ranks(parser, 8)
    add_billions(parser, 0.8, MODELS)
    add_number(parser, '--uplink', 40, 'upload rate of each rank in MB/s')
    add_number(parser, '--repeats', 3, 'measurements per table row')


def measure(args: Namespace) -> dict[str, Any]:
    """Measure the ways in turns.

    Returns:
        For every run, by way: seconds, bytes that rank 0 sent, and bytes then on the local disk.
    """
    memory = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None
    prefixes = [f'run{number}/hf_model_iter_1' for number in range(2 * args.repeats)]
    with (
        tempfile.TemporaryDirectory(dir=memory) as name,
        s3_server('rclone', Path(name), prefixes=prefixes, options=SERVER_OPTIONS) as server,
    ):
        case = {
            'billions': args.billions,
            'repeats': args.repeats,
            'uplink_nbytes_per_sec': args.uplink * 10**6,
        }
        job = {'what': 'out_dir', **case, 'endpoint': server.url, 'objects': str(Path(name, 'objects'))}
        return {'ranks': args.ranks, **case, **run_worker(args.ranks, job, args.out)}
