"""``xhf inspect``: the table of a folder, a checkpoint and a work_dir; what is refused; what is shown of odd names."""

from __future__ import annotations

import json
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


def test_json_and_tensors(made, capsys):
    assert main([str(saved_in(made)), '--json']) == 0
    (found,) = json.loads(capsys.readouterr().out)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(saved_in(made) / 'model.safetensors').items()}
    assert {tensor['name']: tuple(tensor['shape']) for tensor in found['tensors']} == shapes
    assert main([str(saved_in(made)), '--tensors', '2']) == 0
    largest = sorted((tensor['nbytes'] for tensor in found['tensors']), reverse=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('    ')]
    assert len(lines) == 2 and ' BF16 ' in lines[0] and largest[0] >= largest[1]


def test_a_file_of_weights(made, capsys):
    assert main([str(saved_in(made) / 'model.safetensors')]) == 0
    assert rows(capsys.readouterr().out)[0]['kind'] == 'safetensors file'


def test_what_cannot_be_read_is_told_with_the_rest(made, tmp_path, capsys):
    (tmp_path / 'iter_7.pth').write_bytes(b'no checkpoint')
    (tmp_path / 'last_checkpoint').write_text('iter_7.pth')
    save_file({'a': torch.zeros(3)}, _folder(tmp_path / 'hf_model') / 'model.safetensors')
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert rows(said.out)[0]['tensors'] == '1 F32, 3 elements, 12 bytes'
    (line,) = said.err.splitlines()
    assert line.startswith(f'xhf inspect: {tmp_path / "iter_7.pth"}')


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_damaged_weights_are_an_error_beside_the_rest(tmp_path, capsys):
    folder = _folder(tmp_path / 'hf_model')
    save_file({'a': torch.zeros(3)}, folder / 'model-00001-of-00002.safetensors')
    whole = (folder / 'model-00001-of-00002.safetensors').read_bytes()
    (folder / 'model-00002-of-00002.safetensors').write_bytes(whole[:-1])
    for path in (folder, tmp_path):
        assert main([str(path)]) == 1
        (table,) = rows(capsys.readouterr().out)
        assert table['tensors'] == '1 F32, 3 elements, 12 bytes'
        assert table['damaged'].startswith(str(folder / 'model-00002-of-00002.safetensors'))
    assert main([str(folder), '--json']) == 1
    assert len(json.loads(capsys.readouterr().out)[0]['problems']) == 1


@pytest.mark.parametrize('case', ['missing', 'empty', 'fifo', 'text'])
def test_unusable(case, tmp_path, capsys):
    path = tmp_path / 'it.pth'
    if case == 'empty':
        path.mkdir()
    elif case == 'fifo':
        os.mkfifo(path)
    elif case == 'text':
        path.write_text('hello')
    assert main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'xhf inspect: {path}')


@pytest.mark.parametrize('name', ['model.safetensors', 'config.json', 'xhf_manifest.json'])
def test_special_files_are_not_opened(name, made, tmp_path, capsys):
    save_file({'a': torch.zeros(3)}, _folder(tmp_path / 'model') / 'other.safetensors')
    os.mkfifo(tmp_path / 'model' / name)
    assert main([str(tmp_path / 'model')]) == 2
    assert 'a FIFO, not a regular file' in capsys.readouterr().err


def test_nothing_is_executed(tmp_path):
    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return os.mkdir, (str(tmp_path / 'ran'),)

    torch.save({'state_dict': {'a': torch.zeros(2)}, 'other': Runs()}, tmp_path / 'iter_1.pth', pickle_module=pickle)
    main([str(tmp_path / 'iter_1.pth')])
    assert not (tmp_path / 'ran').exists()


def test_names_and_values_are_lines_of_plain_text(tmp_path, capsys):
    folder = save_model('llama', tmp_path / 'odd\x1b[31m')
    save_file({'a\nb\x1b[2J': torch.zeros(3)}, folder / 'model.safetensors')
    edit_json(folder / 'config.json', architectures=['Evil\x1b[0m\nkind  nothing'])
    assert main([str(folder), '--tensors', '1']) == 0
    out = capsys.readouterr().out
    assert '\x1b' not in out and 'Evil\\x1b[0m\\nkind  nothing' in out and 'a\\nb' in out
