"""``xhf inspect``: the table of a folder, a checkpoint and a work_dir; what is refused; what is shown of odd names."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.model_folder import edit_json, save_model, write_manifest
from xhf_hooks.cli.inspect import main

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """A run: its last checkpoint, and what the hook saved."""
    work_dir = tmp_path_factory.mktemp('run')
    saved = save_model('llama', work_dir / '20261122_101010' / 'hf_model', torch.bfloat16)
    write_manifest(saved)
    weights = {f'llm.{name}': tensor for name, tensor in load_file(saved / 'model.safetensors').items()}
    meta = {'iter': 7, 'epoch': 1, 'cfg': "model = dict(type='DemoCausalLM')\n"}
    torch.save({'state_dict': weights, 'meta': meta}, work_dir / 'iter_7.pth')
    (work_dir / 'last_checkpoint').write_text(str(work_dir / 'iter_7.pth'))
    return work_dir


def saved_in(made: Path) -> Path:
    return made / '20261122_101010' / 'hf_model'


def rows(text: str) -> list[dict[str, str]]:
    """Of each table: what is in its first column, and in the second."""
    blocks = [block.splitlines() for block in text.strip().split('\n\n')]
    return [{'path': lines[0]} | {line[2:14].strip(): line[14:] for line in lines[1:]} for lines in blocks]


def test_a_run(made, capsys):
    assert main([str(made)]) == 0
    checkpoint, folder = rows(capsys.readouterr().out)
    tensors = load_file(saved_in(made) / 'model.safetensors')
    n_elements = sum(tensor.numel() for tensor in tensors.values())
    counted = f'{len(tensors)} BF16, {n_elements:,} elements'
    assert checkpoint['path'] == str(made / 'iter_7.pth') and folder['path'] == str(saved_in(made))
    assert checkpoint['kind'] == 'checkpoint (file)' and folder['kind'] == 'Hugging Face folder'
    assert checkpoint['model'] == 'DemoCausalLM' and folder['model'] == 'LlamaForCausalLM'
    assert checkpoint['step'] == 'iter 7, epoch 1' and folder['step'] == 'iter 7'
    assert folder['written by'] == 'deepspeed ZeRO-3, 2 ranks'
    assert checkpoint['tensors'].startswith(counted) and folder['tensors'].startswith(counted)


def test_the_folder_of_one_start(made, capsys):
    """No checkpoint lies there, which is no fault."""
    assert main([str(saved_in(made).parent)]) == 0
    (table,) = rows(capsys.readouterr().out)
    assert table['path'] == str(saved_in(made))


def test_what_cannot_be_read_is_told_with_the_rest(tmp_path, capsys):
    (tmp_path / 'iter_7.pth').write_bytes(b'no checkpoint')
    (tmp_path / 'last_checkpoint').write_text('iter_7.pth')
    (tmp_path / 'hf_model').mkdir()
    save_file({'a': torch.zeros(3)}, tmp_path / 'hf_model' / 'model-00001-of-00002.safetensors')
    (tmp_path / 'hf_model' / 'model-00002-of-00002.safetensors').write_bytes(b'damaged')
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr()
    (table,) = rows(said.out)
    assert table['tensors'] == '1 F32, 3 elements, 12 bytes' and 'damaged' in table
    (line,) = said.err.splitlines()
    assert line.startswith(f'xhf inspect: {tmp_path / "iter_7.pth"}')
    assert main([str(tmp_path / 'hf_model')]) == 1


@pytest.mark.parametrize('case', ['missing', 'empty', 'text'])
def test_unusable(case, tmp_path, capsys):
    path = tmp_path / 'it.pth'
    if case == 'empty':
        path.mkdir()
    elif case == 'text':
        path.write_text('hello')
    assert main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'xhf inspect: {path}')


def test_nothing_is_executed(tmp_path):
    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return os.mkdir, (str(tmp_path / 'ran'),)

    torch.save({'state_dict': {'a': torch.zeros(2)}, 'other': Runs()}, tmp_path / 'iter_1.pth', pickle_module=pickle)
    main([str(tmp_path / 'iter_1.pth')])
    assert not (tmp_path / 'ran').exists()


def test_names_and_values_are_lines_of_plain_text(tmp_path, capsys):
    folder = save_model('llama', tmp_path / 'odd\x1b[31m')
    edit_json(folder / 'config.json', architectures=['Evil\x1b[0m\nkind  nothing'])
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert '\x1b' not in out and 'Evil\\x1b[0m\\nkind  nothing' in out
