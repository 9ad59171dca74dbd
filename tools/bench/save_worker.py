"""Saves a partitioned model in each way, in turns. Runs on: all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from bench.floors import Floors
from bench.measuring import measure, measure_last
from bench.peers import PEERS, DcpPeer
from bench.progress import Progress
from bench.throttle import limited_writes
from bench.ways import DCP_ALL, DCP_RANK0, FSYNC_WORDS, OURS, Way
from xhf_hooks.collective import Collective
from xhf_hooks.config.options import SaveOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import Step
from xhf_hooks.save import Saver

if TYPE_CHECKING:  # importing it prints a warning
    import deepspeed

Tell = Callable[[str], None]
STEP = Step('iter', 1, 1)


#: With 'parallel' a file has one writer; several files per rank let all ranks write about as much.
FILES_PER_RANK = 4


def saver_of(engine: deepspeed.DeepSpeedEngine, writer: str, bucket_nbytes: int, **options: Any) -> Saver:
    """A saver whose file sizes do not depend on the writer."""
    nbytes = sum(parameter.ds_numel * parameter.element_size() for parameter in engine.module.parameters())
    shard_nbytes = nbytes // (FILES_PER_RANK * dist.get_world_size())
    how = SaveOptions(bucket_size=bucket_nbytes, max_shard_size=shard_nbytes)
    saver = Saver(engine.module, how, Collective(), writer=writer, **options)
    saver.prepare()
    return saver


class Ways:
    """The measured ways, by name."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, bucket_nbytes: int) -> None:
        self._engine, self._bucket_nbytes = engine, bucket_nbytes
        self._savers: dict[str, Saver] = {}
        plan = self.saver('stream').plan
        self.nbytes = plan.nbytes
        self.least_nbytes = sum(place.nbytes for place in plan.placements)

    def saver(self, writer: str) -> Saver:
        """The same saver each time, so that a run's second save is measured."""
        if writer not in self._savers:
            self._savers[writer] = saver_of(self._engine, writer, self._bucket_nbytes)
        return self._savers[writer]

    @contextmanager
    def way(self, name: str) -> Iterator[Callable[[Path], object]]:
        """Yields a way. What it needs besides the model is made and freed here, or it would count as others' memory."""
        if name in (DCP_RANK0, DCP_ALL):
            peer = DcpPeer(self._engine.module)
            yield peer.on_rank0 if name == DCP_RANK0 else peer.on_every_rank
        elif name in PEERS:
            yield lambda folder: PEERS[name](self._engine, folder)
        elif name.startswith(OURS):
            writer, words = name.removeprefix(OURS).split(', ', 1)
            fsync = words == FSYNC_WORDS[True]
            saver = self.saver(writer)
            yield lambda folder: saver.save(CheckpointFolder(folder, 1, fsync=fsync), STEP)
        else:
            yield self._floors.ways()[name]

    @cached_property
    def _floors(self) -> Floors:
        """Only made if a floor is measured, since they are as large as the model."""
        return Floors(self.nbytes, self._bucket_nbytes)


def bench_save(engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure the ways in turns, in random order, so that no way always follows the same other one."""
    ways = Ways(engine, job['bucket_nbytes'])
    wanted = [Way(**way) for way in job['ways']]
    turns = _turns(wanted, job['repeats'])
    n_runs, gigabytes = job['in_a_row'], ways.nbytes / 1e9
    progress = Progress([n_runs * (0.5 + way.secs_per_gb * gigabytes) for way in turns], tell)
    runs: dict[str, list[dict[str, float]]] = {way.name: [] for way in wanted}
    for way in turns:
        with ways.way(way.name) as save:
            found = measure_last(n_runs, save, folder, ways.least_nbytes if way.writes else 0)
        runs[way.name].append(found)
        progress.done(way.name, found['seconds'])
    return {'nbytes': ways.nbytes, 'runs': runs}


def bench_throttled(engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure the writers in turns, with each rank's writes limited as by a share.

    Raises:
        RuntimeError: Some bytes were not throttled.
    """
    ways, rate = Ways(engine, job['bucket_nbytes']), job['limit_nbytes_per_sec']
    wanted = [Way(**way) for way in job['ways']]
    turns = _turns(wanted, job['repeats'])
    progress = Progress([0.5 + way.secs_per_gb * ways.nbytes / 1e9 for way in turns], tell)
    runs: dict[str, list[dict[str, float]]] = {way.name: [] for way in wanted}
    for way in turns:
        save = ways.saver(way.name.removeprefix(OURS)).save
        with limited_writes(rate) as throttle:
            found = measure(lambda to, save=save: save(CheckpointFolder(to, 1), STEP), folder, ways.least_nbytes)
        held_back: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(held_back, throttle.nbytes)
        if sum(held_back) < ways.least_nbytes:
            raise RuntimeError(f'{way.name}: of {ways.least_nbytes} bytes only {sum(held_back)} were held back')
        runs[way.name].append({**found, 'written_by_busiest_mb': max(held_back) / 1e6})
        progress.done(way.name, found['seconds'])
    return {'nbytes': ways.nbytes, 'limit_nbytes_per_sec': rate, 'limited_runs': runs}


def _turns(ways: list[Way], repeats: int) -> list[Way]:
    order = random.Random(0)
    return [way for _ in range(repeats) for way in order.sample(ways, len(ways))]
