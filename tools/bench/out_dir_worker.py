"""Saves a partitioned model to an object store: from the memory of all ranks, and by rank 0 from its disk."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from bench.peers import xtuner_way
from bench.progress import in_turns
from bench.upload import limited_sending
from tests.helpers.s3_servers import BUCKET, CREDENTIALS
from xhf_hooks.collective import Collective
from xhf_hooks.model import unwrap
from xhf_hooks.options import SaveOptions
from xhf_hooks.places.store import StoreFolder
from xhf_hooks.planning.types import Step
from xhf_hooks.save import Saver

if TYPE_CHECKING:  # importing it prints a warning
    import deepspeed

OURS = "out_dir='s3://...', all ranks from memory"
RANK0 = 'gather, save_pretrained to a local folder, rank 0 uploads that (boto3)'
_FILES_PER_RANK = 2


def bench_out_dir(
    engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], folder: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Measure both ways in turns. Runs on: all ranks."""
    os.environ.update(CREDENTIALS)
    nbytes = sum(parameter.ds_numel * parameter.element_size() for parameter in engine.module.parameters())
    n_files = _FILES_PER_RANK * dist.get_world_size()
    saver = Saver(unwrap(engine), SaveOptions(max_shard_size=nbytes // n_files), Collective(), writer='parallel')
    saver.prepare()
    numbers = itertools.count()

    def one(way: str) -> dict[str, float]:
        name = f'run{next(numbers)}'
        url = f's3://{BUCKET}/{name}'
        with limited_sending(job['uplink_nbytes_per_sec']) as throttle:
            save = _ours(saver, url, job) if way == OURS else _rank0(engine, url, job, folder)
            dist.barrier()
            began, before = time.perf_counter(), throttle.nbytes
            save()
            dist.barrier()
            seconds = time.perf_counter() - began
        sent: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(sent, throttle.nbytes - before)
        if sum(sent) < nbytes:
            raise RuntimeError(f'{way}: of {nbytes} bytes only {sum(sent)} were sent')
        on_disk = sum(path.stat().st_size for path in folder.parent.rglob('*') if path.is_file())
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder.parent, ignore_errors=True)
            shutil.rmtree(Path(job['objects'], BUCKET, name))
        return {'seconds': seconds, 'sent_mb': sent[0] / 1e6, 'on_disk_mb': on_disk / 1e6}

    return {'nbytes': nbytes, 'runs': in_turns([OURS, RANK0], job['repeats'], one, tell)}


def _ours(saver: Saver, url: str, job: dict[str, Any]) -> Callable[[], object]:
    target = StoreFolder(url, 1, {'endpoint_url': job['endpoint']})
    if dist.get_rank() == 0:
        target.claim()
    else:
        target.connect()

    def save() -> None:
        saver.save(target, Step('iter', 1, 1))
        target.release()

    return save


def _rank0(engine: deepspeed.DeepSpeedEngine, url: str, job: dict[str, Any], folder: Path) -> Callable[[], object]:
    """Like llm-foundry; boto3's transfer manager with its defaults: ten threads, parts of 8 MB."""
    import boto3

    client = boto3.client('s3', endpoint_url=job['endpoint'])

    def save() -> None:
        xtuner_way(engine, folder)
        if dist.get_rank() == 0:
            for path in sorted(folder.iterdir()):
                client.upload_file(str(path), BUCKET, f'{url.rpartition("/")[2]}/{path.name}')

    return save
