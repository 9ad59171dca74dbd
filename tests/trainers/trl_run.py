"""A trainer of TRL with the callback, then TRL's own save, on every rank.

``trl_run.py sft|lora|dpo zero2|zero3|fsdp2 BASE OUT``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
from accelerate.state import DistributedType, PartialState
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.helpers.runs.zero_config import zero_config
from tests.trainers.inputs import pairs, texts, zero3
from xhf_hooks.integrations.transformers import HFCheckpointCallback

trainer_name, engine, base, out = sys.argv[1:]
engines: dict[str, dict[str, Any]] = {
    'zero2': dict(deepspeed=zero_config(2)),
    'zero3': dict(deepspeed=zero3()),
    'fsdp2': dict(fsdp=True, fsdp_config={'version': 2, 'transformer_layer_cls_to_wrap': ['LlamaDecoderLayer']}),
}
make_config, make_trainer, lines = (
    (DPOConfig, DPOTrainer, pairs) if trainer_name == 'dpo' else (SFTConfig, SFTTrainer, texts)
)
arguments = make_config(
    output_dir=out,
    max_steps=4,
    max_length=32,
    per_device_train_batch_size=1,
    learning_rate=1e-3,
    save_strategy='no',
    report_to='none',
    bf16=True,
    use_cpu=True,
    ddp_backend='gloo',
    **engines[engine],
)
if engine == 'fsdp2':
    PartialState().distributed_type = DistributedType.MULTI_GPU  # on CPUs, Accelerate would not use FSDP
callback = HFCheckpointCallback(save_strategy='steps', save_steps=2, save_total_limit=2)
trainer = make_trainer(
    base,
    args=arguments,
    train_dataset=datasets.Dataset.from_list(lines()),
    callbacks=[callback],
    peft_config=LoraConfig(target_modules='all-linear', task_type='CAUSAL_LM') if trainer_name == 'lora' else None,
)
trainer.train()
assert trainer.is_fsdp_enabled is (engine == 'fsdp2')
assert type(trainer.model_wrapped).__name__.startswith('FSDP') is (engine == 'fsdp2')
trainer.save_model(str(Path(out, 'theirs')))
