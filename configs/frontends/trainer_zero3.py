"""transformers.Trainer with DeepSpeed ZeRO-3, saved as a Hugging Face folder beside its checkpoints.

    torchrun --standalone --nproc_per_node 2 configs/frontends/trainer_zero3.py MODEL OUT

OUT/hf_model is loaded by from_pretrained(OUT + '/hf_model').
"""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from xhf_hooks.integrations.transformers import HFCheckpointCallback

base, out = sys.argv[1:]
on_cpu = not torch.cuda.is_available()
arguments = TrainingArguments(
    output_dir=out,
    max_steps=4,
    per_device_train_batch_size=2,
    save_strategy='no',
    report_to='none',
    bf16=True,
    use_cpu=on_cpu,
    ddp_backend='gloo' if on_cpu else 'nccl',
    deepspeed=dict(
        bf16=dict(enabled=True),
        zero_optimization=dict(stage=3),
        zero_allow_untested_optimizer=True,
        train_micro_batch_size_per_gpu='auto',
    ),
)
model = AutoModelForCausalLM.from_pretrained(base)
tokens = torch.randint(model.config.vocab_size, (8, 16))
data = [dict(input_ids=row, labels=row) for row in tokens]
Trainer(model, arguments, train_dataset=data, callbacks=[HFCheckpointCallback()]).train()
