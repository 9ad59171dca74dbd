"""TRL's SFTTrainer at ZeRO-3 with the callback, then TRL's own save: ``trl_sft.py BASE OUT``, on every rank."""

from __future__ import annotations

import sys
from pathlib import Path

import datasets
from trl import SFTConfig, SFTTrainer

from tests.trainers.inputs import texts, zero3
from xhf_hooks.integrations.transformers import HFCheckpointCallback

base, out = sys.argv[1:]
arguments = SFTConfig(
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
    deepspeed=zero3(),
)
callback = HFCheckpointCallback(save_strategy='steps', save_steps=2, max_keep_ckpts=2)
trainer = SFTTrainer(base, arguments, train_dataset=datasets.Dataset.from_list(texts()), callbacks=[callback])
trainer.train()
trainer.save_model(str(Path(out, 'theirs')))
