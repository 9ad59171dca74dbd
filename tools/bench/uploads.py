"""Sends a partitioned model to an object store in each way, and trains beside it. Runs on: all ranks."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from bench.launch import Figures, in_turns
from bench.saves import LOG, STEP, Tell, Training, saver_of
from bench.throttle import limited_sending
from bench.ways import UPLOAD, UPLOAD_BOTO3
from tests.helpers.faults.s3_servers import BUCKET, CREDENTIALS
from xhf_hooks.background.upload import Uploads, uploads_of_run
from xhf_hooks.collective import Collective
from xhf_hooks.places.checkpoint_folder import CheckpointFolder

if TYPE_CHECKING:  # importing it prints a warning
    import deepspeed

_LEAST_ITERATIONS = 5


class Ways:
    """Uploads of saves on the local disk, each under a name of its own."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], folder: Path) -> None:
        os.environ.update(CREDENTIALS)
        self._job, self._folder = job, folder
        self._store = {'endpoint_url': job['endpoint']}
        self._numbers = itertools.count()
        self._saver = saver_of(engine, 'parallel')
        self.nbytes = self._saver.plan.nbytes

    def measure(self, way: str) -> Figures:
        """Seconds of one way, and what rank 0 sent."""
        name = f'run{next(self._numbers)}'
        prepare = {UPLOAD: self._upload, UPLOAD_BOTO3: self._upload_boto3}
        with limited_sending(self._job['uplink_nbytes_per_sec']) as throttle, prepare[way](name) as send:
            dist.barrier()
            began, before = time.perf_counter(), throttle.nbytes
            send()
            dist.barrier()
            seconds = time.perf_counter() - began
        sent: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(sent, throttle.nbytes - before)
        stored = sum(path.stat().st_size for path in Path(self._job['objects'], BUCKET, name).rglob('*'))
        if min(sum(sent), stored) < self.nbytes:
            raise RuntimeError(f'{way}: of {self.nbytes} bytes only {sum(sent)} were sent and {stored} stored')
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder.parent, ignore_errors=True)
            shutil.rmtree(Path(self._job['objects'], BUCKET, name))
        return {'seconds': seconds, 'sent_mb': sent[0] / 1e6}

    @contextmanager
    def save_and_claim(self, name: str) -> Iterator[tuple[Callable[[], None], Callable[..., bool]]]:
        """A save on the local disk; yields what begins its upload, as ``upload_to`` does, and what tells its end."""
        target, collective = CheckpointFolder(self._folder, 1), Collective()
        self._saver.save(target, STEP)
        url = f's3://{BUCKET}/{name}'
        uploads: Uploads = uploads_of_run(url, self._store, -1, [self._folder], collective, LOG)
        uploads.claim()

        def is_over(within_secs: float = 0.0) -> bool:
            over = uploads.wait(within_secs)
            if over and uploads.failed:
                raise RuntimeError(f'not uploaded: {uploads.failed}')
            return over

        yield lambda: uploads.committed(target, STEP, collective), is_over
        uploads.close()
        collective.close()

    @contextmanager
    def _upload(self, name: str) -> Iterator[Callable[[], object]]:
        with self.save_and_claim(name) as (begin, is_over):
            yield lambda: (begin(), is_over(3600.0))

    @contextmanager
    def _upload_boto3(self, name: str) -> Iterator[Callable[[], object]]:
        """boto3's transfer manager with its defaults: ten threads, parts of 8 MB."""
        import boto3

        self._saver.save(CheckpointFolder(self._folder, 1), STEP)

        def send() -> None:
            client = boto3.client('s3', **self._store)
            if dist.get_rank() == 0:
                for path in sorted(self._folder.iterdir()):
                    client.upload_file(str(path), BUCKET, f'{name}/{path.name}')

        yield send


def bench_upload(engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure uploads of a save on the local disk, in turns."""
    ways = Ways(engine, job, folder)
    return {'nbytes': ways.nbytes, 'runs': in_turns([UPLOAD, UPLOAD_BOTO3], job['repeats'], ways.measure, tell)}


def bench_training(engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure iterations beside an upload and, before and after it, without one."""
    ways, training, runs = Ways(engine, job, folder), Training(engine), []
    for number in range(job['repeats']):
        with limited_sending(job['uplink_nbytes_per_sec']), ways.save_and_claim(f'run{number}') as (begin, is_over):
            before, secs = training.run(_LEAST_ITERATIONS)
            begin()
            others = time.process_time() - time.thread_time()
            beside, beside_secs = training.run(1, is_over)
            processor = (time.process_time() - time.thread_time() - others) / beside_secs
            after, after_secs = training.run(_LEAST_ITERATIONS)
        alone = (before + after) / (secs + after_secs)
        runs.append({'slowed_by': 1 - beside / beside_secs / alone, 'processor': processor})
        tell(f'[{number + 1}/{job["repeats"]}] training beside an upload: slowed by {runs[-1]["slowed_by"]:.1%}')
    return {'nbytes': ways.nbytes, 'runs': runs}
