"""Saves a partitioned model in each way, in turns. Runs on: all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from bench.floors import Floors
from bench.measuring import measure, measure_last
from bench.peers import PEERS, DcpPeer
from bench.progress import in_turns
from bench.throttle import limited_writes
from bench.ways import DCP, FLAT, FLOOR_GATHER, FSYNC_WORDS, HSDP, OURS, name_of_ours
from tests.helpers.runs.fsdp_runs import shard
from xhf_hooks.collective import Collective
from xhf_hooks.options import SaveOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import Step
from xhf_hooks.saves.saver import Saver
from xhf_hooks.saves.telemetry import RunLog
from xhf_hooks.saves.unwrap import unwrap

if TYPE_CHECKING:  # importing it prints a warning
    import deepspeed

Tell = Callable[[str], None]
STEP = Step('iter', 1, 1)


#: With 'parallel' a file has one writer; several files per rank let all ranks write about as much.
FILES_PER_RANK = 4


def n_parameters(model: nn.Module) -> int:
    """Of the whole model."""
    return sum(getattr(parameter, 'ds_numel', parameter.numel()) for parameter in model.parameters())


def saver_of(model: nn.Module, writer: str, bucket_nbytes: int, **options: Any) -> Saver:
    """A saver of a bf16 model, whose file sizes do not depend on the writer."""
    nbytes = 2 * n_parameters(model)
    shard_nbytes = nbytes // (FILES_PER_RANK * dist.get_world_size())
    how = SaveOptions(bucket_size=bucket_nbytes, max_shard_size=shard_nbytes)
    log = RunLog(logging.getLogger('bench'), 'saver')
    return Saver(unwrap(model), how, Collective(), log, writer=writer, **options)


class Ways:
    """The measured ways, by name."""

    def __init__(self, engine: nn.Module, bucket_nbytes: int) -> None:
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
        if name == DCP:
            yield DcpPeer(self._engine.module).save
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
    """Measure the ways in turns."""
    ways = Ways(engine, job['bucket_nbytes'])

    def one(way: str) -> dict[str, float]:
        with ways.way(way) as save:
            return measure_last(job['in_a_row'], save, folder, 0 if way == FLOOR_GATHER else ways.least_nbytes)

    return {'nbytes': ways.nbytes, 'runs': in_turns(job['ways'], job['repeats'], one, tell)}


def bench_hsdp(model: nn.Module, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Shard a model and a copy of it, and measure both in turns."""
    sharded = {FLAT: shard(deepcopy(model), 'fsdp2'), HSDP: shard(model, 'hsdp2')}
    ways = {kind: Ways(each, job['bucket_nbytes']) for kind, each in sharded.items()}

    def one(way: str) -> dict[str, float]:
        kind = FLAT if way.endswith(FLAT) else HSDP
        writer = way.removeprefix(OURS).removesuffix(kind)
        with ways[kind].way(name_of_ours(writer, fsync=False)) as save:
            return measure_last(job['in_a_row'], save, folder, ways[kind].least_nbytes)

    return {'nbytes': ways[FLAT].nbytes, 'runs': in_turns(job['ways'], job['repeats'], one, tell)}


def bench_throttled(engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure the writers in turns, with each rank's writes limited as by a share.

    Raises:
        RuntimeError: Some bytes were not throttled.
    """
    ways, rate = Ways(engine, job['bucket_nbytes']), job['limit_nbytes_per_sec']

    def one(way: str) -> dict[str, float]:
        save = ways.saver(way.removeprefix(OURS)).save
        with limited_writes(rate) as throttle:
            found = measure(lambda to: save(CheckpointFolder(to, 1), STEP), folder, ways.least_nbytes)
        held_back: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(held_back, throttle.nbytes)
        if sum(held_back) < ways.least_nbytes:
            raise RuntimeError(f'{way}: of {ways.least_nbytes} bytes only {sum(held_back)} were held back')
        return {**found, 'written_by_busiest_mb': max(held_back) / 1e6}

    runs = in_turns(job['ways'], job['repeats'], one, tell)
    return {'nbytes': ways.nbytes, 'limit_nbytes_per_sec': rate, 'limited_runs': runs}
