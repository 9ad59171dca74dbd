"""LMDeploy, with which XTuner's users serve: its TurboMind converter reads a folder of the hook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.helpers.checks.compare import folder_tensors
from tests.helpers.models.model_folder import save_tokenizer
from xhf_hooks import save_hf

#: TurboMind takes no other size of a head than 64 and 128.
SIZES = dict(vocab_size=320, hidden_size=192, intermediate_size=136, num_attention_heads=3, num_key_value_heads=1)


def test_turbomind_has_every_tensor(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
    folder, out = tmp_path / 'hf_model', tmp_path / 'workspace'
    save_hf(LlamaForCausalLM(config).bfloat16(), folder, max_shard_size='100KB')
    save_tokenizer(folder, config.vocab_size)
    program = Path(__file__).with_name('lmdeploy_run.py')
    done = subprocess.run([sys.executable, program, folder, out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = {path.name: path.read_bytes() for path in (out / 'triton_models' / 'weights').glob('*weight')}
    for name, tensor in in_turbomind(folder_tensors(folder), config).items():
        assert files.pop(name) == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name
    assert files == {}


def in_turbomind(tensors: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    """The tensors as lmdeploy/turbomind/deploy/module.py lays them: matrices transposed, heads turned."""

    def turned(weight: torch.Tensor) -> torch.Tensor:
        heads = weight.T.reshape(config.hidden_size, -1, 2, 32)
        return heads.transpose(2, 3).reshape(config.hidden_size, -1)

    found = {
        'tok_embeddings.0.weight': tensors['model.embed_tokens.weight'],
        'norm.weight': tensors['model.norm.weight'],
        'output.0.weight': tensors['lm_head.weight'],
    }
    for i in range(config.num_hidden_layers):
        theirs, ours = f'layers.{i}', f'model.layers.{i}'
        q, k, v, o = (tensors[f'{ours}.self_attn.{x}_proj.weight'] for x in 'qkvo')
        found[f'{theirs}.attention.w_qkv.0.weight'] = torch.cat([turned(q), turned(k), v.T], dim=1)
        found[f'{theirs}.attention.wo.0.weight'] = o.T
        for number, name in ((1, 'gate'), (2, 'down'), (3, 'up')):
            found[f'{theirs}.feed_forward.w{number}.0.weight'] = tensors[f'{ours}.mlp.{name}_proj.weight'].T
        found[f'{theirs}.attention_norm.weight'] = tensors[f'{ours}.input_layernorm.weight']
        found[f'{theirs}.ffn_norm.weight'] = tensors[f'{ours}.post_attention_layernorm.weight']
    return found
