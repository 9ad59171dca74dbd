"""Saves a partitioned model in each way, and trains beside its saves. Runs on: all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from bench.launch import Figures, in_turns
from bench.measuring import clear, measure
from bench.peers import PEERS, DcpPeer, Floors, MetaPeer, xtuner_way
from bench.throttle import limited_writes
from bench.ways import AS_THE_HOOK, ASYNC, BUCKET_NBYTES, DCP, FLAT, HSDP, META, NO_SAVE, OURS, SYNC, XTUNER
from tests.helpers.runs.engines import Saver
from tests.helpers.runs.fsdp_runs import shard
from xhf_hooks.files.output_file import WriteBehind
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import Step
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.preflight import reserve_snapshot

Tell = Callable[[str], None]
STEP = Step('iter', 1, 1)
#: With 'parallel' a file has one writer; several files per rank let all ranks write about as much.
FILES_PER_RANK = 4
#: Tokens of a training iteration, which is a forward pass that gathers every parameter like ZeRO-3.
N_TOKENS = 64
ITERATIONS = 4  # without a save
LIMIT_NBYTES_PER_SEC = 300 * 10**6


def n_parameters(model: nn.Module) -> int:
    """Of the whole model."""
    return sum(getattr(parameter, 'ds_numel', parameter.numel()) for parameter in model.parameters())


def saver_of(model: nn.Module, writer: str, in_background: bool = False) -> Saver:
    """A saver of a bf16 model, whose file sizes do not depend on the writer."""
    shard_nbytes = 2 * n_parameters(model) // (FILES_PER_RANK * dist.get_world_size())
    how = dict(bucket_size=BUCKET_NBYTES, max_shard_size=shard_nbytes, in_background=in_background)
    return Saver(model, Collective.connect(), writer=writer, **how)


@contextmanager
def without_fsync() -> Iterator[None]:
    """Inside, saves are left in the page cache, as by those that do not flush."""
    with patch('os.fsync'), patch.object(WriteBehind, 'wrote'):
        yield


class Ways:
    """The measured ways, by name."""

    def __init__(self, engine: nn.Module) -> None:
        self._engine = engine
        # The same saver each time, so that a run's second save is measured
        self._saver = cache(partial(saver_of, engine))
        self._target = cache(lambda folder: CheckpointFolder(folder, 1))
        plan = self._saver('stream').plan
        self.nbytes = plan.nbytes
        self.least_nbytes = sum(place.nbytes for place in plan.placements)
        # Only made if a floor is measured, since they are as large as the model
        self._floors = cache(lambda: Floors(plan.nbytes))

    def way(self, name: str) -> Callable[[Path], object]:
        """What DCP needs besides the model is made here and freed with the way, or it would count as others' memory."""
        if name == DCP:
            return DcpPeer(self._engine.module).save
        if name == META:
            return MetaPeer(self._engine.module).save
        if name in PEERS:
            return partial(PEERS[name], self._engine)
        if name.startswith(OURS):
            saver = self._saver(name.removeprefix(OURS).partition(',')[0])
            how = nullcontext if name.endswith(AS_THE_HOOK) else without_fsync

            def save(folder: Path) -> None:
                with how():
                    saver.save(self._target(folder), STEP)

            return save
        return partial(self._floors().write, name)

    def settle(self, folder: Path) -> None:
        """Wait for what a run does beside training: the deletion of the save that was replaced."""
        self._target(folder).siblings.deletion.wait()


def bench_save(model: nn.Module, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure the ways in turns: of an engine; or of a model that is sharded in two ways, a name's end says which."""
    models = {'': model}
    if job['what'] == 'hsdp':
        models = {FLAT: shard(deepcopy(model), 'fsdp2'), HSDP: shard(model, 'hsdp2')}
    ways = {kind: Ways(each) for kind, each in models.items()}
    limit = LIMIT_NBYTES_PER_SEC if job['what'] == 'throttled' else 0  # of each rank, as by a share

    def one(name: str) -> Figures:
        of_kind = next(each for kind, each in ways.items() if name.endswith(kind))
        way, in_a_row = of_kind.way(name), list[Figures]()
        clear(folder, sync=True)
        with limited_writes(limit) if limit else nullcontext():
            for _ in range(job['in_a_row']):
                in_a_row.append(measure(way, folder, of_kind.least_nbytes))
                of_kind.settle(folder)
        # A virtual machine's host takes free memory back within a second, and new pages cost up to 3 us each: the same
        # save takes 0.3 to 5 s. The last run starts when the files of the one before it have just freed their memory
        return in_a_row[-1]

    runs = in_turns(job['ways'], job['repeats'], one, tell)
    return {'nbytes': next(iter(ways.values())).nbytes, 'limit_nbytes_per_sec': limit, 'runs': runs}


class Training:
    """Iterations of a fixed batch, on all ranks."""

    def __init__(self, engine: nn.Module) -> None:
        self._engine = engine
        self._tokens = torch.arange(N_TOKENS).reshape(1, -1)
        self.run(2)  # in the first, DeepSpeed records the order of its gathers

    def run(self, n_least: int, is_over: Callable[[], bool] = lambda: True) -> tuple[int, float]:
        """Run ``n_least`` iterations, and more until ``is_over`` on all ranks; returns how many, and their seconds."""
        started, n_done = time.perf_counter(), 0
        while True:
            with torch.no_grad():
                self._engine(input_ids=self._tokens)
            n_done += 1
            stop = torch.tensor([int(n_done >= n_least and is_over())])
            dist.all_reduce(stop, op=dist.ReduceOp.MIN)
            if stop.item():
                return n_done, time.perf_counter() - started


def bench_stall(engine: nn.Module, job: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Measure in turns how long a save stops training, and how much it slows it meanwhile."""
    saver, target = saver_of(engine, 'positional', in_background=True), CheckpointFolder(folder, 1)
    reserve_snapshot(saver.context)
    training = Training(engine)

    def one(way: str) -> Figures:
        target.siblings.deletion.wait()
        clear(folder, sync=True)
        if way in (SYNC, ASYNC):
            saver.save(target, STEP)  # the one that is replaced
            dist.barrier()
        if way == NO_SAVE:
            n_done, seconds = training.run(ITERATIONS)
            return {'stalled_secs': 0.0, 'iterations_per_sec': n_done / seconds}
        started = time.perf_counter()
        if way == XTUNER:
            xtuner_way(engine, folder)
        elif way == SYNC:
            saver.save(target, STEP)
        else:
            saving = saver.start(target, STEP)
        dist.barrier()
        stalled_secs = time.perf_counter() - started
        if way != ASYNC:
            return {'stalled_secs': stalled_secs, 'save_secs': stalled_secs}
        n_done, seconds = training.run(1, saving.done)
        save_secs = saving.result().cost.seconds
        return {
            'stalled_secs': stalled_secs,
            'save_secs': save_secs,
            'beside_secs': save_secs - stalled_secs,
            'iterations': n_done,
            'iterating_secs': seconds,
        }

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
