"""A loop of your own with Accelerate and DeepSpeed ZeRO-3, saved as a Hugging Face folder.

    torchrun --standalone --nproc_per_node 2 configs/frontends/accelerate_zero3.py MODEL OUT

OUT/hf_model is loaded by from_pretrained(OUT + '/hf_model'). Needs pip install '.[deepspeed,trainer]'.
"""

import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from transformers import AutoModelForCausalLM

from xhf_hooks import save_hf

base, out = sys.argv[1:]
zero3 = dict(
    bf16=dict(enabled=True),
    zero_optimization=dict(stage=3),
    zero_allow_untested_optimizer=True,
    train_micro_batch_size_per_gpu=2,
)
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero3))
model = AutoModelForCausalLM.from_pretrained(base)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(model.config.vocab_size, (16, 16))
loader = torch.utils.data.DataLoader(tokens, batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, batch in enumerate(loader, start=1):
    batch = batch.to(model.device)
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 0:
        save_hf(model, f'{out}/hf_model', step=step)
accelerator.end_training()
