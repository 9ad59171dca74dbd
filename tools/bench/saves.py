"""Saves a partitioned model in each way, and trains beside its saves. Runs on: all ranks."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from bench.launch import Figures, in_turns
from bench.measuring import clear, measure_last
from bench.peers import PEERS, DcpPeer, Floors, xtuner_way
from bench.throttle import limited_writes
from bench.ways import ASYNC, BUCKET_NBYTES, DCP, FLAT, FSYNC_WORDS, HSDP, NO_SAVE, OURS, SYNC, XTUNER
from tests.helpers.runs.fsdp_runs import shard
from xhf_hooks.collective import Collective
from xhf_hooks.options import SaveOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import Step
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.saves.saver import Saver
from xhf_hooks.saves.telemetry import RunLog
from xhf_hooks.saves.unwrap import unwrap

if TYPE_CHECKING:  # importing it prints a warning
    import deepspeed

Tell = Callable[[str], None]
STEP = Step('iter', 1, 1)
LOG = RunLog(logging.getLogger('bench'), 'bench')
#: With 'parallel' a file has one writer; several files per rank let all ranks write about as much.
FILES_PER_RANK = 4
#: Tokens of a training iteration, which is a forward pass that gathers every parameter like ZeRO-3.
N_TOKENS = 64


def n_parameters(model: nn.Module) -> int:
    """Of the whole model."""
    return sum(getattr(parameter, 'ds_numel', parameter.numel()) for parameter in model.parameters())


def saver_of(model: nn.Module, writer: str, **options: Any) -> Saver:
    """A saver of a bf16 model, whose file sizes do not depend on the writer."""
    nbytes = 2 * n_parameters(model)
    shard_nbytes = nbytes // (FILES_PER_RANK * dist.get_world_size())
    how = SaveOptions(bucket_size=BUCKET_NBYTES, max_shard_size=shard_nbytes)
    return Saver(unwrap(model), how, Collective(), LOG, strategy=WriteStrategy(writer), **options)


class Ways:
    """The measured ways, by name."""

    def __init__(self, engine: nn.Module) -> None:
        self._engine = engine
        self._savers: dict[str, Saver] = {}
        plan = self._saver('stream').plan
        self.nbytes = plan.nbytes
        self.least_nbytes = sum(place.nbytes for place in plan.placements)

    def _saver(self, writer: str) -> Saver:
        """The same saver each time, so that a run's second save is measured."""
        if writer not in self._savers:
            self._savers[writer] = saver_of(self._engine, writer)
        return self._savers[writer]

    @contextmanager
    def way(self, name: str) -> Iterator[Callable[[Path], object]]:
        """Yields a way. What it needs besides the model is made and freed here, or it would count as others' memory."""
        if name == DCP:
            yield DcpPeer(self._engine.module).save
        elif name in PEERS:
            yield lambda folder: PEERS[name](self._engine, folder)
        elif name.startswith(OURS):
            writer, comma, words = name.removeprefix(OURS).partition(', ')
            saver, fsync = self._saver(writer), f'{comma}{words}' == FSYNC_WORDS[True]
            yield lambda folder: saver.save(CheckpointFolder(folder, 1, fsync=fsync), STEP)
        else:
            yield lambda folder: self._floors.write(name, folder)

    @cached_property
    def _floors(self) -> Floors:
        """Only made if a floor is measured, since they are as large as the model."""
        return Floors(self.nbytes)


def bench_save(engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure the ways in turns, with each rank's writes limited as by a share if the job says so."""
    ways, limit = Ways(engine), 10**6 * job.get('limit', 0)

    def one(way: str) -> Figures:
        with ways.way(way) as save, limited_writes(limit) if limit else nullcontext():
            return measure_last(job['in_a_row'], save, folder, ways.least_nbytes)

    runs = in_turns(job['ways'], job['repeats'], one, tell)
    return {'nbytes': ways.nbytes, 'limit_nbytes_per_sec': limit, 'runs': runs}


def bench_hsdp(model: nn.Module, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Shard a model and a copy of it, and measure both in turns."""
    sharded = {FLAT: shard(deepcopy(model), 'fsdp2'), HSDP: shard(model, 'hsdp2')}
    ways = {kind: Ways(each) for kind, each in sharded.items()}

    def one(way: str) -> Figures:
        kind = FLAT if way.endswith(FLAT) else HSDP
        with ways[kind].way(way) as save:
            return measure_last(job['in_a_row'], save, folder, ways[kind].least_nbytes)

    return {'nbytes': ways[FLAT].nbytes, 'runs': in_turns(job['ways'], job['repeats'], one, tell)}


class Training:
    """Iterations of a fixed batch, on all ranks."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self._engine = engine
        self._tokens = torch.arange(N_TOKENS).reshape(1, -1)
        self.run(2)  # in the first, DeepSpeed records the order of its gathers

    def run(self, n_least: int, is_over: Callable[[], bool] = lambda: True) -> tuple[int, float]:
        """Run ``n_least`` iterations, and more until ``is_over`` on all ranks at the end of one.

        Returns:
            Number of iterations, and their seconds.
        """
        started, n_done = time.perf_counter(), 0
        while True:
            with torch.no_grad():
                self._engine(input_ids=self._tokens)
            n_done += 1
            stop = torch.tensor([int(n_done >= n_least and is_over())])
            dist.all_reduce(stop, op=dist.ReduceOp.MIN)
            if stop.item():
                return n_done, time.perf_counter() - started


def bench_stall(engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure in turns how long a save stops training, and how much it slows it meanwhile."""
    saver = saver_of(engine, 'positional', in_background=True)
    saver.reserve_snapshot()
    training = Training(engine)

    def instead(way: str) -> Figures:
        started = time.perf_counter()
        if way == XTUNER:
            xtuner_way(engine, folder)
        else:
            saver.save(CheckpointFolder(folder, 1), STEP)
        dist.barrier()
        seconds = time.perf_counter() - started
        return {'stalled_secs': seconds, 'save_secs': seconds}

    def beside() -> Figures:
        started = time.perf_counter()
        saving = saver.start(CheckpointFolder(folder, 1), STEP)
        dist.barrier()
        stalled_secs = time.perf_counter() - started
        n_done, seconds = training.run(1, lambda: saving.done())
        save_secs = saving.result().cost.seconds
        return {
            'stalled_secs': stalled_secs,
            'save_secs': save_secs,
            'beside_secs': save_secs - stalled_secs,
            'iterations': n_done,
            'iterating_secs': seconds,
        }

    def one(way: str) -> Figures:
        clear(folder, sync=True)
        if way == NO_SAVE:
            n_done, seconds = training.run(job['iterations'])
            return {'stalled_secs': 0.0, 'iterations_per_sec': n_done / seconds}
        return beside() if way == ASYNC else instead(way)

    runs = in_turns([XTUNER, SYNC, ASYNC, NO_SAVE], job['repeats'], one, tell)
    saver.close()
    _add_slowdown(runs)
    return {'nbytes': saver.plan.nbytes, 'runs': runs}


def _add_slowdown(runs: dict[str, list[Figures]]) -> None:
    """Add the share of training's speed that each save beside it left, from whole iterations with and without it.

    A save is about as long as an iteration, so the iterations that it slows go on after its end. What they lose,
    they lose while it is written.
    """
    alone = statistics.median(found['iterations_per_sec'] for found in runs[NO_SAVE])
    for found in runs[ASYNC]:
        lost_secs = found['iterating_secs'] - found['iterations'] / alone
        found['speed_share'] = 1 - lost_secs / found['beside_secs']
        found['iterations_per_sec'] = alone * found['speed_share']
