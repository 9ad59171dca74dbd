"""``swift sft`` of ms-swift on two ranks: each runs the program that ``swift`` hands to torchrun."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.helpers.models.model_folder import save_model
from tests.trainers.compare import HERE, assert_saved, run
from tests.trainers.inputs import chats, zero3

OPTIONS = """
    --model_type llama --template llama3 --torch_dtype bfloat16 --max_length 64
    --dataloader_num_workers 0 --max_steps 4 --save_steps 4 --gradient_accumulation_steps 1 --learning_rate 1e-3
    --use_cpu true --ddp_backend gloo --report_to none --add_version false --callbacks hf_checkpoint
"""


@pytest.mark.parametrize('tuned', ['full', 'lora'])
def test_swift(tmp_path, monkeypatch, tuned):
    monkeypatch.setenv('MODELSCOPE_CACHE', str(tmp_path / 'cache'))
    base, out, dataset = save_model('llama', tmp_path / 'base'), tmp_path / 'out', tmp_path / 'chats.jsonl'
    dataset.write_text('\n'.join(map(json.dumps, chats())))
    given = {
        **{'--model': base, '--dataset': dataset, '--output_dir': out, '--deepspeed': json.dumps(zero3())},
        '--external_plugins': HERE / 'swift_plugin.py',
        '--tuner_type': tuned,
    }
    program = Path(importlib.util.find_spec('swift').origin).with_name('cli') / 'sft.py'
    said = run(program, *OPTIONS.split(), *(word for option in given.items() for word in option))
    assert_saved(out, out / 'checkpoint-4', base, said)
