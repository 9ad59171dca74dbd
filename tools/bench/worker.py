"""One rank with a partitioned model: reads FOLDER/job.json, writes FOLDER/result.json and FOLDER/progress."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.convert_worker import Trained, bench_checkpoint
from bench.launch import MODELS
from bench.save_worker import bench_hsdp, bench_save, bench_throttled, n_parameters
from bench.stall_worker import bench_stall
from bench.stores_worker import bench_training, bench_upload

BENCHES = {
    'checkpoint': bench_checkpoint,
    'save': bench_save,
    'hsdp': bench_hsdp,
    'throttled': bench_throttled,
    'stall': bench_stall,
    'upload': bench_upload,
    'training': bench_training,
}


def build(job: dict[str, Any]) -> nn.Module:
    """A bf16 Llama, whole or at ZeRO-3: an optimizer only if the job names one, so larger models fit."""
    config = {
        'train_micro_batch_size_per_gpu': 1,
        'bf16': {'enabled': True},
        'zero_optimization': {
            'stage': 3,
            'stage3_gather_16bit_weights_on_model_save': True,
            'sub_group_size': int(1e8),
        },
        'zero_allow_untested_optimizer': True,
        'zero_force_ds_cpu_optimizer': False,
    }
    torch.manual_seed(0)
    llama = LlamaConfig(vocab_size=30000, **MODELS[job['billions']])
    if job['what'] == 'hsdp':
        return LlamaForCausalLM(llama).bfloat16()
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = LlamaForCausalLM(llama)
    if 'optimizer' not in job:
        return deepspeed.initialize(model=model, config=config)[0]
    model = Trained(model)
    optimizer = getattr(torch.optim, job['optimizer'])(model.parameters(), lr=1e-5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / 'job.json').read_text())
    deepspeed.init_distributed(dist_backend='gloo')
    with (folder / 'progress').open('a', buffering=1) as progress:

        def tell(line: str) -> None:
            if dist.get_rank() == 0:
                print(line, file=progress)

        model = build(job)
        content = BENCHES[job['what']](model, job, folder / 'saves' / 'hf_model', tell)
    if dist.get_rank() == 0:
        (folder / 'result.json').write_text(json.dumps({'parameters': n_parameters(model), **content}))
        shutil.rmtree(folder / 'saves', ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
