"""One rank that makes the input of ``tools/bench.py convert``: a ZeRO-3 checkpoint like those of XTuner runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.convert import SIZES

#: Elements to change at once: a temporary tensor as large as a rank's fp32 master weights would not fit.
CHUNK = 2**24
TAG = 'iter_1.pth'


class Trained(nn.Module):
    """The names that XTuner's SupervisedFinetune gives its parameters."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.llm = LlamaForCausalLM(config)

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.llm(**batch)


def architecture(billions: float) -> LlamaConfig:
    """Sizes differ only in layers, so the largest tensor is the same; the smallest is for trying out."""
    tiny = billions < 0.1
    return LlamaConfig(
        vocab_size=30000,
        hidden_size=128 if tiny else 2048,
        intermediate_size=352 if tiny else 5504,
        num_hidden_layers=SIZES[billions][0],
        num_attention_heads=16,
        num_key_value_heads=16,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--billions', type=float, required=True)
    parser.add_argument('--folder', type=Path, required=True)
    args = parser.parse_args()

    deepspeed.init_distributed(dist_backend='gloo')
    config = {
        'train_micro_batch_size_per_gpu': 1,
        'bf16': {'enabled': True},
        'zero_optimization': {'stage': 3, 'sub_group_size': int(1e8)},
        'zero_allow_untested_optimizer': True,
        'zero_force_ds_cpu_optimizer': False,
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = Trained(architecture(args.billions))
    kind = {'adamw': torch.optim.AdamW, 'sgd': torch.optim.SGD}[SIZES[args.billions][1]]
    engine, *_ = deepspeed.initialize(model=model, optimizer=kind(model.parameters(), lr=1e-5), config=config)
    for group in engine.optimizer.fp32_partitioned_groups_flat:
        for chunk in group.data.split(CHUNK):
            chunk += 1e-4 * torch.randn_like(chunk)  # fp32 master weights that bf16 cannot represent
    if SIZES[args.billions][1] == 'adamw':  # one step creates its states
        ids = torch.arange(16).reshape(1, 16)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(args.folder), tag=TAG)
    if dist.get_rank() == 0:
        engine.module.llm.config.save_pretrained(args.folder / 'base')
        shapes = {name: list(parameter.ds_shape) for name, parameter in engine.module.llm.named_parameters()}
        (args.folder / 'shapes.json').write_text(json.dumps(shapes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
