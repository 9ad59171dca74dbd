"""Axolotl on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.models.model_folder import save_model
from tests.trainers.compare import assert_saved, run
from tests.trainers.inputs import texts, zero3


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train as a YAML with these lines and docs/trainers.md's says; return output_dir and what rank 0 printed."""
    monkeypatch.setenv('AXOLOTL_DO_NOT_TRACK', '1')
    monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))

    def train(base: Path, **lines: Any) -> tuple[Path, str]:
        out, data, config = (tmp_path / name for name in ('out', 'texts.jsonl', 'config.yaml'))
        data.write_text(''.join(f'{json.dumps(line)}\n' for line in texts()))
        settings = {
            'base_model': str(base),
            'plugins': ['xhf_hooks.integrations.axolotl.HFCheckpointPlugin', 'tests.trainers.axolotl_cpu.OnCPU'],
            'save_strategy': 'no',
            'hf_checkpoint': {'save_strategy': 'steps', 'save_steps': 2, 'save_total_limit': 2},
            'datasets': [{'path': str(data), 'ds_type': 'json', 'type': 'completion'}],
            'dataset_prepared_path': str(tmp_path / 'prepared'),
            'dataset_num_proc': 1,
            'output_dir': str(out),
            'sequence_len': 32,
            'micro_batch_size': 1,
            'gradient_accumulation_steps': 1,
            'max_steps': 4,
            'learning_rate': 0.001,
            'lr_scheduler': 'constant',
            'optimizer': 'adamw_torch',
            'bf16': True,
            'attn_implementation': 'eager',
            **lines,
        }
        config.write_text(json.dumps(settings))  # which is YAML, too
        return out, run('axolotl_run.py', config)

    return train


FSDP2 = {
    'fsdp_version': 2,
    'fsdp_config': {
        'auto_wrap_policy': 'TRANSFORMER_BASED_WRAP',
        'transformer_layer_cls_to_wrap': 'LlamaDecoderLayer',
        'state_dict_type': 'FULL_STATE_DICT',
        'reshard_after_forward': True,
    },
}
LORA = {'adapter': 'lora', 'lora_r': 4, 'lora_alpha': 8, 'lora_target_linear': True}
LORA |= {'lora_mlp_kernel': False}  # else kernels for GPUs


@pytest.fixture
def zero(tmp_path):
    """What the YAML says for ZeRO-3."""
    path = tmp_path / 'zero3.json'
    path.write_text(json.dumps(zero3()))
    return {'deepspeed': str(path)}


def test_zero3(tmp_path, train, zero):
    """Axolotl's own save goes into output_dir."""
    base = save_model('llama', tmp_path / 'base')
    out, said = train(base, **zero)
    assert_saved(out, out, base, said)


def test_fsdp2(tmp_path, train):
    base = save_model('llama', tmp_path / 'base')
    out, said = train(base, **FSDP2)
    assert 'trained: FSDPLlamaForCausalLM' in said
    assert_saved(out, out, base, said, ('torch', None))


def test_lora(tmp_path, train, zero):
    """Axolotl saves the adapter, and config.json beside it."""
    out, said = train(save_model('llama', tmp_path / 'base'), **zero, **LORA)
    assert [assert_whole(out / name) for name in ('hf_model_iter_2', 'hf_model')] == [2, 4]
    assert_same_folder_tensors(out / 'hf_model', out)
    assert (out / 'hf_model' / 'adapter_model.safetensors').exists()
    assert 'saved iter_4 to hf_model' in said
