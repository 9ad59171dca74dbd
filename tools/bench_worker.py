"""One rank of ``tools/bench.py save``: builds a partitioned model and saves it in each way, in turns."""

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
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from xhf_hooks.collective import Collective
from xhf_hooks.commit.staging import CheckpointFolder
from xhf_hooks.memory import MemoryMeter, return_freed_memory
from xhf_hooks.records import Step
from xhf_hooks.save import SaveOptions, Saver

#: Billions of parameters to the number of layers; all else is equal, so the largest tensor is too.
LAYERS = {0.8: 14, 1.6: 30}
FLOOR = 'floor: one process writes as many bytes'
XTUNER = "XTuner's hook: consolidate, save_pretrained"


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


def xtuner_way(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """What xtuner 0.2.0's HFCheckpointHook.after_run does, without the tokenizer."""
    state_dict = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(folder, state_dict=state_dict)
    dist.barrier()


def floor(nbytes: int, folder: Path) -> None:
    """One process writes as many bytes, from memory that it already has."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        block = memoryview(bytes(16 * 2**20))
        with (folder / 'bytes').open('wb', buffering=0) as file:
            for start in range(0, nbytes, len(block)):
                file.write(block[: nbytes - start])
    dist.barrier()


def measure(way: Callable[[Path], None], folder: Path) -> dict[str, float]:
    """Seconds until all ranks are done, and extra anonymous bytes of the busiest."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    gc.collect()
    return_freed_memory()  # or this run would use, unseen, what the one before has freed
    dist.barrier()
    with PeakSampler() as sampler:
        started = time.perf_counter()
        way(folder)
        dist.barrier()
        seconds = time.perf_counter() - started
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, sampler.meter.peak_extra_nbytes)
    return {'seconds': seconds, 'peak_extra_mb': max(peaks) / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--billions', type=float, required=True)
    parser.add_argument('--repeats', type=int, required=True)
    parser.add_argument('--bucket-size', type=int, required=True)
    parser.add_argument('--folder', type=Path, required=True)
    parser.add_argument('--result', type=Path, required=True)
    args = parser.parse_args()

    deepspeed.init_distributed(dist_backend='gloo')
    engine = build_engine(args.billions)
    saver = Saver(engine.module, SaveOptions(bucket_nbytes=args.bucket_size), Collective())
    plan = saver.prepare()
    step = Step('iter', 1, 1)
    folder = args.folder / 'hf_model'
    ways = {
        FLOOR: lambda f: floor(plan.nbytes, f),
        XTUNER: lambda f: xtuner_way(engine, f),
        'xhf_hooks stream, without fsync': lambda f: saver.save(CheckpointFolder(f, 1, fsync=False), step),
        'xhf_hooks stream, with fsync, as the hook': lambda f: saver.save(CheckpointFolder(f, 1), step),
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    order = random.Random(0)
    for _ in range(args.repeats):
        for name in order.sample(list(ways), len(ways)):  # no way always follows the same other one
            results[name].append(measure(ways[name], folder))
    if dist.get_rank() == 0:
        parameters = sum(p.ds_numel for p in engine.module.parameters())
        content = {'parameters': parameters, 'nbytes': plan.nbytes, 'runs': results}
        args.result.write_text(json.dumps(content))
        shutil.rmtree(args.folder, ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
