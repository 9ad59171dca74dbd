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

from bench.launch import MODELS
from bench.saves import bench_save, bench_stall, n_parameters
from bench.uploads import bench_training, bench_upload
from tests.helpers.runs.zero_config import zero_config


class Trained(nn.Module):
    """The names that XTuner's SupervisedFinetune gives its parameters."""

    def __init__(self, llm: nn.Module) -> None:
        super().__init__()
        self.llm = llm

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.llm(**batch)


def build(job: dict[str, Any]) -> nn.Module:
    """A bf16 Llama, whole or at ZeRO-3: an optimizer only if the job names one, so larger models fit."""
    config = zero_config(
        3,
        stage3_gather_16bit_weights_on_model_save=True,
        stage3_param_persistence_threshold=100_000,  # DeepSpeed's own: what is smaller stays whole
        sub_group_size=int(1e8),
    )
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


def make_checkpoint(engine: deepspeed.DeepSpeedEngine, job: dict[str, Any], *_: Any) -> dict[str, Any]:
    """Save a checkpoint like those of XTuner runs, and the config of its base model, into the job's folder."""
    for group in engine.optimizer.fp32_partitioned_groups_flat:
        for chunk in group.data.split(2**24):  # a temporary tensor as large as the group would not fit
            chunk += 1e-4 * torch.randn_like(chunk)  # fp32 master weights that bf16 cannot represent
    if job['optimizer'] == 'AdamW':  # one step creates its states
        ids = torch.arange(16).reshape(1, 16)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(job['folder'], tag='iter_1.pth')
    if dist.get_rank() == 0:
        engine.module.llm.config.save_pretrained(Path(job['folder'], 'base'))
    return {'shapes': {name: list(p.ds_shape) for name, p in engine.module.llm.named_parameters()}}


#: By what a job asks for; the others ask for saves.
BENCHES = {
    'checkpoint': make_checkpoint,
    'stall': bench_stall,
    'upload': bench_upload,
    'training': bench_training,
}


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / 'job.json').read_text())
    deepspeed.init_distributed(dist_backend='gloo')
    with (folder / 'progress').open('a', buffering=1) as progress:

        def tell(line: str) -> None:
            if dist.get_rank() == 0:
                print(line, file=progress)

        model = build(job)
        bench = BENCHES.get(job['what'], bench_save)
        content = bench(model, job, folder / 'saves' / 'hf_model', tell)
    if dist.get_rank() == 0:
        (folder / 'result.json').write_text(json.dumps({'parameters': n_parameters(model), **content}))
        shutil.rmtree(folder / 'saves', ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
