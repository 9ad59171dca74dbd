"""Sends a partitioned model to an object store in each way, in turns. Runs on: all ranks."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from bench.progress import Figures, in_turns
from bench.save_worker import STEP, Tell, saver_of
from bench.stall_worker import Training
from bench.throttle import limited_sending
from tests.helpers.faults.s3_servers import BUCKET, CREDENTIALS
from xhf_hooks.background.upload import uploads_of_run
from xhf_hooks.collective import Collective
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.saves.telemetry import RunLog

if TYPE_CHECKING:  # importing it prints a warning
    import deepspeed

UPLOAD = 'upload_to, all ranks'
UPLOAD_BOTO3 = "rank 0 uploads the folder with boto3's transfer manager"
_BUCKET_NBYTES = 128 * 10**6
_LEAST_ITERATIONS = 5


class Ways:
    """The measured ways, by name. Each prepares a run and returns what is timed; the run ends with the block."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], folder: Path) -> None:
        os.environ.update(CREDENTIALS)
        self._job, self._folder = job, folder
        self._store = {'endpoint_url': job['endpoint']}
        self._numbers = itertools.count()
        self._saver = saver_of(engine, 'parallel', _BUCKET_NBYTES)
        self.nbytes = self._saver.plan.nbytes

    def measure(self, way: str) -> Figures:
        """Seconds of one way, and what it sent."""
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
    def save_and_claim(self, name: str) -> Iterator[Upload]:
        """The upload of a save on the local disk, before it begins."""
        self._saver.save(CheckpointFolder(self._folder, 1), STEP)
        upload = Upload(self._folder, f's3://{BUCKET}/{name}', self._store)
        yield upload
        upload.close()

    @contextmanager
    def _upload(self, name: str) -> Iterator[Callable[[], object]]:
        with self.save_and_claim(name) as upload:
            yield lambda: (upload.begin(), upload.is_over(3600.0))

    @contextmanager
    def _upload_boto3(self, name: str) -> Iterator[Callable[[], object]]:
        self._saver.save(CheckpointFolder(self._folder, 1), STEP)
        yield lambda: self._boto3(name)

    def _boto3(self, name: str) -> None:
        """boto3's transfer manager with its defaults: ten threads, parts of 8 MB."""
        import boto3

        client = boto3.client('s3', **self._store)
        if dist.get_rank() == 0:
            for path in sorted(self._folder.iterdir()):
                client.upload_file(str(path), BUCKET, f'{name}/{path.name}')


class Upload:
    """What a run with ``upload_to`` does for one save."""

    def __init__(self, folder: Path, url: str, store: dict[str, Any]) -> None:
        log = RunLog(logging.getLogger('bench'), 'bench')
        self._collective, self._target = Collective(), CheckpointFolder(folder, 1)
        self._uploads = uploads_of_run(url, store, -1, [folder], self._collective, log)
        self._uploads.claim()

    def begin(self) -> None:
        self._uploads.committed(self._target, STEP, self._collective)

    def is_over(self, within_secs: float = 0.0) -> bool:
        over = self._uploads.wait(within_secs)
        if over and self._uploads.failed:
            raise RuntimeError(f'not uploaded: {self._uploads.failed}')
        return over

    def close(self) -> None:
        self._uploads.close()
        self._collective.close()


def bench_upload(engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure uploads of a save on the local disk, in turns."""
    ways = Ways(engine, job, folder)
    return {'nbytes': ways.nbytes, 'runs': in_turns([UPLOAD, UPLOAD_BOTO3], job['repeats'], ways.measure, tell)}


def bench_training(engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure iterations beside an upload and, before and after it, without one."""
    ways, training, runs = Ways(engine, job, folder), Training(engine), []
    for number in range(job['repeats']):
        with limited_sending(job['uplink_nbytes_per_sec']), ways.save_and_claim(f'run{number}') as upload:
            before, secs = training.run(_LEAST_ITERATIONS)
            upload.begin()
            others = time.process_time() - time.thread_time()
            beside, beside_secs = training.run(1, upload.is_over)
            processor = (time.process_time() - time.thread_time() - others) / beside_secs
            after, after_secs = training.run(_LEAST_ITERATIONS)
        alone = (before + after) / (secs + after_secs)
        runs.append({'slowed_by': 1 - beside / beside_secs / alone, 'processor': processor})
        tell(f'[{number + 1}/{job["repeats"]}] training beside an upload: slowed by {runs[-1]["slowed_by"]:.1%}')
    return {'nbytes': ways.nbytes, 'runs': runs}
