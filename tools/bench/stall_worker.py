"""Measures how long a save stops training, and how much it slows it meanwhile. Runs on: all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bench.measuring import clear
from bench.peers import xtuner_way
from bench.progress import in_turns
from bench.save_worker import STEP, Tell, saver_of
from bench.ways import ASYNC, NO_SAVE, SYNC, XTUNER
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.saves.saver import Saver

if TYPE_CHECKING:  # importing it prints a warning
    import deepspeed

#: Tokens of a training iteration, which is a forward pass that gathers every parameter like ZeRO-3.
N_TOKENS = 64


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
    """Measure the ways in turns."""
    saver = saver_of(engine, 'positional', job['bucket_nbytes'], in_background=True)
    saver.reserve_snapshot()
    training = Training(engine)

    def one(way: str) -> dict[str, float]:
        clear(folder, sync=True)
        if way == NO_SAVE:
            n_done, seconds = training.run(job['iterations'])
            return {'stalled_secs': 0.0, 'iterations_per_sec': n_done / seconds}
        return _beside(saver, training, folder) if way == ASYNC else _instead(saver, engine, way, folder)

    runs = in_turns([XTUNER, SYNC, ASYNC, NO_SAVE], job['repeats'], one, tell)
    saver.close()
    add_slowdown(runs)
    return {'nbytes': saver.plan.nbytes, 'runs': runs}


def _beside(saver: Saver, training: Training, folder: Path) -> dict[str, float]:
    started = time.perf_counter()
    saving = saver.start(CheckpointFolder(folder, 1), STEP)
    dist.barrier()
    stalled_secs = time.perf_counter() - started
    n_done, seconds = training.run(1, lambda: saving.done)
    save_secs = saving.outcome().cost.seconds
    return {
        'stalled_secs': stalled_secs,
        'save_secs': save_secs,
        'beside_secs': save_secs - stalled_secs,
        'iterations': n_done,
        'iterating_secs': seconds,
    }


def add_slowdown(runs: dict[str, list[dict[str, float]]]) -> None:
    """Add the share of training's speed that each save beside it left, from whole iterations with and without it.

    A save is about as long as an iteration, so the iterations that it slows go on after its end. What they lose,
    they lose while it is written.
    """
    alone = statistics.median(found['iterations_per_sec'] for found in runs[NO_SAVE])
    for found in runs[ASYNC]:
        lost_secs = found['iterating_secs'] - found['iterations'] / alone
        found['speed_share'] = 1 - lost_secs / found['beside_secs']
        found['iterations_per_sec'] = alone * found['speed_share']


def _instead(saver: Saver, engine: deepspeed.DeepSpeedEngine, way: str, folder: Path) -> dict[str, float]:
    started = time.perf_counter()
    if way == XTUNER:
        xtuner_way(engine, folder)
    else:
        saver.save(CheckpointFolder(folder, 1), STEP)
    dist.barrier()
    seconds = time.perf_counter() - started
    return {'stalled_secs': seconds, 'save_secs': seconds}
