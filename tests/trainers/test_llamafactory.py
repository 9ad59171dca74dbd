"""LLaMA-Factory's ``run_exp`` on two ranks."""

from __future__ import annotations

import json

import pytest

from tests.helpers.models.model_folder import save_model
from tests.trainers.compare import assert_saved, run
from tests.trainers.inputs import chats, zero3


@pytest.mark.parametrize('tuned', ['full', 'lora'])
def test_llamafactory(tmp_path, tuned):
    base, out = save_model('llama', tmp_path / 'base'), tmp_path / 'out'
    (tmp_path / 'chats.json').write_text(json.dumps(chats()))
    names = {'role_tag': 'role', 'content_tag': 'content', 'user_tag': 'user', 'assistant_tag': 'assistant'}
    described = {'file_name': 'chats.json', 'formatting': 'sharegpt', 'columns': {'messages': 'messages'}}
    (tmp_path / 'dataset_info.json').write_text(json.dumps({'chats': {**described, 'tags': names}}))
    options = {
        **{'stage': 'sft', 'do_train': True, 'finetuning_type': tuned, 'lora_rank': 4},
        **{'model_name_or_path': str(base), 'output_dir': str(out), 'deepspeed': zero3()},
        **{'dataset': 'chats', 'dataset_dir': str(tmp_path), 'cache_dir': str(tmp_path), 'template': 'default'},
        **{'cutoff_len': 64, 'max_steps': 4, 'save_strategy': 'no', 'learning_rate': 1e-3},
        **{'per_device_train_batch_size': 1, 'bf16': True, 'use_cpu': True, 'ddp_backend': 'gloo', 'report_to': 'none'},
    }
    (tmp_path / 'run.yaml').write_text(json.dumps(options))
    said = run('llamafactory_run.py', tmp_path / 'run.yaml')
    assert_saved(out, out, base, said)
