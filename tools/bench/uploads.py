"""Sends a partitioned model to an object store in each way, and trains beside it. Runs on: all ranks.

Each rank's uplink is throttled. The server is ``rclone serve s3`` on this machine, in memory. Ranks and server share
the processors, so with 8 ranks at 40 MB/s 2 cores are the limit, not the uplinks. The slowdown of training beside an
upload is measured with one rank and a slow uplink, which leave the server a core.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

from bench.launch import Figures, in_turns
from bench.saves import STEP, Tell, Training, saver_of
from bench.throttle import limited_sending
from bench.ways import UPLOAD, UPLOAD_BOTO3
from tests.helpers.faults.s3_servers import BUCKET, CREDENTIALS, s3_server
from tests.helpers.runs.engines import Saver
from xhf_hooks.options import RunOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.ends.upload import Uploads, start_uploads

_UPLINK_NBYTES_PER_SEC = 40 * 10**6
_UPLINK_BESIDE_TRAINING = 10 * 10**6
_LEAST_ITERATIONS = 5


@contextmanager
def served(n_uploads: int) -> Iterator[tuple[str, Path]]:
    """A store for that many uploads, which rank 0 serves until the block ends: its URL, and where it keeps objects."""
    os.environ.update(CREDENTIALS)
    found = [('', Path())]
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            memory = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
            prefixes = [f'run{number}/run/hf_model_iter_1' for number in range(n_uploads)]
            # The server keeps no MD5 of an object, and would read the object again whenever a client asks about it.
            # Real stores do not, and so neither does this one. It still computes the MD5 of each part, as they do.
            server = stack.enter_context(s3_server('rclone', place, prefixes=prefixes, options=('--etag-hash', '')))
            found = [(server, place / 'objects' / BUCKET)]
        dist.broadcast_object_list(found)
        yield found[0]


@contextmanager
def begun_run(
    saver: Saver, folder: Path, url: str, name: str
) -> Iterator[tuple[Callable[[], None], Callable[..., bool]]]:
    """A save on the local disk; yields what begins its upload, as ``upload_to`` does, and what tells its end."""
    target, collective = CheckpointFolder(folder, 1), Collective.connect()
    saver.save(target, STEP)
    options = RunOptions(upload_to=f's3://{BUCKET}/{name}', storage_options={'endpoint_url': url})
    with patch('xhf_hooks.runs.ends.upload.run_prefix', lambda timestamp: 'run'):  # as the server was told
        uploads: Uploads = start_uploads(options, [folder], collective, saver.context.log, None)
    uploads.require_usable()

    def is_over(within_secs: float = 0.0) -> bool:
        over = uploads.wait(within_secs)
        if over and uploads.failed:
            raise RuntimeError(f'not uploaded: {uploads.failed}')
        return over

    yield lambda: uploads.handle_commit(target, STEP, collective), is_over
    uploads.close()
    collective.close()


def bench_upload(engine: nn.Module, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure uploads of a save on the local disk, in turns: seconds, and what rank 0 sent."""
    import boto3

    ways = [UPLOAD, UPLOAD_BOTO3]
    names = [f'run{number}' for number in range(len(ways) * job['repeats'])]
    saver = saver_of(engine, 'parallel')
    nbytes = saver.plan.nbytes
    with served(len(names)) as (url, objects):

        def one(way: str) -> Figures:
            name = names.pop()
            uplink, run = limited_sending(_UPLINK_NBYTES_PER_SEC), begun_run(saver, folder, url, name)
            with uplink as throttle, run as (begin, is_over):
                dist.barrier()
                began, before = time.perf_counter(), throttle.nbytes
                if way == UPLOAD:
                    begin()
                    is_over(3600.0)
                elif dist.get_rank() == 0:  # the transfer manager with its defaults: ten threads, parts of 8 MB
                    client = boto3.client('s3', endpoint_url=url)
                    for path in sorted(folder.iterdir()):
                        client.upload_file(str(path), BUCKET, f'{name}/{path.name}')
                dist.barrier()
                seconds = time.perf_counter() - began
            sent: list[int] = [0] * dist.get_world_size()
            dist.all_gather_object(sent, throttle.nbytes - before)
            stored = sum(path.stat().st_size for path in (objects / name).rglob('*'))
            if min(sum(sent), stored) < nbytes:
                raise RuntimeError(f'{way}: of {nbytes} bytes only {sum(sent)} were sent and {stored} stored')
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder.parent, ignore_errors=True)
                shutil.rmtree(objects / name)
            return {'seconds': seconds, 'sent_mb': sent[0] / 1e6}

        runs = in_turns(ways, job['repeats'], one, tell)
        return {'uplink_nbytes_per_sec': _UPLINK_NBYTES_PER_SEC, 'nbytes': nbytes, 'runs': runs}


def bench_training(engine: nn.Module, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure iterations beside an upload and, before and after it, without one."""
    saver = saver_of(engine, 'parallel')
    with served(job['repeats']) as (url, _):
        training, runs = Training(engine), []
        for number in range(job['repeats']):
            run = begun_run(saver, folder, url, f'run{number}')
            with limited_sending(_UPLINK_BESIDE_TRAINING), run as (begin, is_over):
                before, secs = training.run(_LEAST_ITERATIONS)
                begin()
                others = time.process_time() - time.thread_time()
                beside, beside_secs = training.run(1, is_over)
                processor = (time.process_time() - time.thread_time() - others) / beside_secs
                after, after_secs = training.run(_LEAST_ITERATIONS)
            alone = (before + after) / (secs + after_secs)
            runs.append({'slowed_by': 1 - beside / beside_secs / alone, 'processor': processor})
            tell(f'[{number + 1}/{job["repeats"]}] training beside an upload: slowed by {runs[-1]["slowed_by"]:.1%}')
        return {'uplink_nbytes_per_sec': _UPLINK_BESIDE_TRAINING, 'nbytes': saver.plan.nbytes, 'runs': runs}
