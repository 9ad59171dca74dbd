"""One rank of ``tools/bench.py save`` and ``stall``: a partitioned model, saved in each way, in turns."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from bench.launch import LAYERS
from bench.peers import (
    DCP,
    FLOOR,
    FLOOR_ALL,
    FLOOR_FSYNC,
    FLOOR_GATHER,
    PEERS,
    XTUNER,
    DcpPeer,
    Floor,
    limited_writes,
    xtuner_way,
)
from xhf_hooks.commit.checkpoint_folder import CheckpointFolder
from xhf_hooks.config.options import SaveOptions
from xhf_hooks.distributed.collective import Collective
from xhf_hooks.planning.types import Step
from xhf_hooks.save import Saver
from xhf_hooks.telemetry.memory import MemoryMeter, return_freed_memory

WRITERS = ('stream', 'parallel', 'positional')
#: Bytes per second that a rank may write where the network to a share is what limits it.
LIMIT = 300 * 10**6
#: A training iteration of ``stall``: a forward pass of so many tokens, every parameter gathered as ZeRO-3 does.
N_TOKENS = 64


class PeakSampler:
    """Samples this process's extra anonymous memory every 2 ms while the block runs."""

    def __enter__(self) -> PeakSampler:
        self.meter = MemoryMeter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            self.meter.sample()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def build_engine(billions: float) -> deepspeed.DeepSpeedEngine:
    """A bf16 Llama at ZeRO-3 without an optimizer, so that models of this size fit a small machine."""
    config = {
        'train_micro_batch_size_per_gpu': 1,
        'bf16': {'enabled': True},
        'zero_optimization': {'stage': 3, 'stage3_gather_16bit_weights_on_model_save': True},
    }
    architecture = LlamaConfig(
        vocab_size=30000,
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=LAYERS[billions],
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = LlamaForCausalLM(architecture)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def measure(way: Callable[[Path], None], folder: Path, nbytes: int) -> dict[str, float]:
    """Seconds until all ranks are done, and extra anonymous bytes of the busiest.

    Raises:
        RuntimeError: The way has not written so many bytes.
    """
    gc.collect()
    return_freed_memory()  # or this run would use, unseen, what the one before has freed
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    with PeakSampler() as sampler:
        started = time.perf_counter()
        way(folder)
        dist.barrier()
        seconds = time.perf_counter() - started
    written = sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())
    if written < nbytes:
        raise RuntimeError(f'{folder}: expected at least {nbytes} bytes, found {written}')
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, sampler.meter.peak_extra_nbytes)
    return {'seconds': seconds, 'peak_extra_mb': max(peaks) / 1e6}


def measure_last(n_runs: int, way: Callable[[Path], None], folder: Path, nbytes: int) -> dict[str, float]:
    """:func:`measure`, of the last of ``n_runs`` in a row (bench.py says why)."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    return [measure(way, folder, nbytes) for _ in range(n_runs)][-1]


def saver_of(engine: deepspeed.DeepSpeedEngine, writer: str, bucket_nbytes: int, **options: Any) -> Saver:
    saver = Saver(engine.module, SaveOptions(bucket_size=bucket_nbytes), Collective(), writer=writer, **options)
    saver.prepare()
    return saver


def bench_save(engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Every way in turns, so that no way always follows the same other one."""
    savers = {writer: saver_of(engine, writer, args.bucket_size) for writer in WRITERS}
    nbytes = savers['stream'].plan.nbytes
    step = Step('iter', 1, 1)
    floor = Floor(nbytes)
    ways: dict[str, Callable[[Path], None]] = {
        FLOOR: floor.on_one_rank,
        FLOOR_FSYNC: lambda folder: floor.on_one_rank(folder, fsync=True),
        FLOOR_ALL: floor.on_all_ranks,
        FLOOR_GATHER: lambda _: floor.all_gathered(args.bucket_size),
    }
    ways.update((name, lambda folder, way=way: way(engine, folder)) for name, way in PEERS.items())
    for fsync, words in ((False, 'without fsync'), (True, 'with fsync, as the hook')):
        for writer, saver in savers.items():
            ways[f'xhf_hooks {writer}, {words}'] = lambda folder, saver=saver, fsync=fsync: saver.save(
                CheckpointFolder(folder, 1, fsync=fsync), step
            )
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in [*ways, DCP]}
    order = random.Random(0)
    folder = args.folder / 'hf_model'
    measured = partial(measure_last, args.in_a_row)
    n_least = sum(p.nbytes for p in savers['stream'].plan.placements)
    for _ in range(args.repeats):
        for name in order.sample(list(runs), len(runs)):
            if name == DCP:  # its tensors are made, and freed, around it: they would count as others' memory
                dcp = DcpPeer(engine.module)
                runs[name].append(measured(dcp.save, folder, n_least))
                del dcp
            else:
                runs[name].append(measured(ways[name], folder, 0 if name == FLOOR_GATHER else n_least))
    limited: dict[str, list[dict[str, float]]] = {f'xhf_hooks {writer}': [] for writer in WRITERS}
    for _ in range(args.repeats):
        for writer in order.sample(WRITERS, len(WRITERS)):
            with limited_writes(LIMIT):
                save = partial(savers[writer].save, step=step)
                found = measure(lambda folder, save=save: save(CheckpointFolder(folder, 1)), folder, n_least)
            limited[f'xhf_hooks {writer}'].append(found)
    return {'nbytes': nbytes, 'runs': runs, 'limit_nbytes_per_sec': LIMIT, 'limited_runs': limited}


def iterate(engine: deepspeed.DeepSpeedEngine, until: Callable[[int], bool]) -> tuple[int, float]:
    """Training iterations, and seconds, until all ranks are told to stop."""
    tokens = torch.arange(N_TOKENS).reshape(1, -1)
    n_done, started = 0, time.perf_counter()
    while True:
        with torch.no_grad():
            engine(input_ids=tokens)
        n_done += 1
        stop = torch.tensor([int(until(n_done))])
        dist.all_reduce(stop, op=dist.ReduceOp.MIN)
        if stop.item():
            return n_done, time.perf_counter() - started


def bench_stall(engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace) -> dict[str, Any]:
    """For how long training stands still, and how fast it is while a save is written beside it."""
    saver = saver_of(engine, 'positional', args.bucket_size, in_background=True)
    saver.reserve_snapshot()
    nbytes, step = saver.plan.nbytes, Step('iter', 1, 1)
    folder = args.folder / 'hf_model'
    runs: dict[str, list[dict[str, float]]] = {XTUNER: [], 'xhf_hooks positional, async': [], 'no save': []}
    order = random.Random(0)
    iterate(engine, lambda n: n >= 2)  # DeepSpeed records the order of its gathers in the first
    for _ in range(args.repeats):
        for name in order.sample(list(runs), len(runs)):
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
                os.sync()
            dist.barrier()
            found = {'stalled_secs': 0.0, 'save_secs': 0.0}
            if name == XTUNER:
                figures = measure(lambda to: xtuner_way(engine, to), folder, nbytes - 2**20)
                found = {'stalled_secs': figures['seconds'], 'save_secs': figures['seconds']}
            if name.startswith('xhf_hooks'):
                started = time.perf_counter()
                saver.start(CheckpointFolder(folder, 1), step)
                dist.barrier()
                found['stalled_secs'] = time.perf_counter() - started
                n_done, seconds = iterate(engine, lambda n: saver.background.done)
                found['save_secs'] = saver.background.outcome().cost.seconds
            else:
                n_done, seconds = iterate(engine, lambda n: n >= args.iterations)
            runs[name].append({**found, 'iterations': n_done, 'iterations_per_sec': n_done / seconds})
    saver.close()
    return {'nbytes': nbytes, 'runs': runs}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('what', choices=['save', 'stall'])
    parser.add_argument('--billions', type=float, required=True)
    parser.add_argument('--repeats', type=int, required=True)
    parser.add_argument('--bucket-size', type=int, required=True)
    parser.add_argument('--folder', type=Path, required=True)
    parser.add_argument('--result', type=Path, required=True)
    parser.add_argument('--iterations', type=int, default=4)
    parser.add_argument('--in-a-row', type=int)
    args = parser.parse_args()

    deepspeed.init_distributed(dist_backend='gloo')
    engine = build_engine(args.billions)
    content = (bench_save if args.what == 'save' else bench_stall)(engine, args)
    if dist.get_rank() == 0:
        parameters = sum(p.ds_numel for p in engine.module.parameters())
        args.result.write_text(json.dumps({'parameters': parameters, **content}))
        shutil.rmtree(args.folder, ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
