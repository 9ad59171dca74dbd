"""A loop of your own with FSDP, saved as a Hugging Face folder.

    torchrun --standalone --nproc_per_node 2 configs/frontends/fsdp.py MODEL OUT

OUT/hf_model is loaded by from_pretrained(OUT + '/hf_model').
"""

import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from xhf_hooks import save_hf

base, out = sys.argv[1:]
device = 'cuda' if torch.cuda.is_available() else 'cpu'
torch.distributed.init_process_group('nccl' if device == 'cuda' else 'gloo')
mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
model = AutoModelForCausalLM.from_pretrained(base).to(device)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1, 5):
    tokens = torch.randint(model.config.vocab_size, (2, 16), device=device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 0:
        save_hf(model, f'{out}/hf_model', step=step)
torch.distributed.destroy_process_group()
