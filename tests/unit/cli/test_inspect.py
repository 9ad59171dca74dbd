"""``xhf inspect``: a folder, a checkpoint and a work_dir; what is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models.model_folder import save_model, write_manifest
from xhf_hooks.cli.inspect import main


def test_a_run(tmp_path, capsys):
    """Its last checkpoint, and what the hook saved."""
    saved = save_model('llama', tmp_path / '20261122_101010' / 'hf_model', torch.bfloat16)
    write_manifest(saved)
    weights = {f'llm.{name}': tensor for name, tensor in load_file(saved / 'model.safetensors').items()}
    meta = {'iter': 7, 'epoch': 1, 'cfg': "model = dict(type='DemoCausalLM')\n"}
    torch.save({'state_dict': weights, 'meta': meta}, tmp_path / 'iter_7.pth')
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'iter_7.pth'))
    assert main([str(tmp_path)]) == 0
    checkpoint, folder = capsys.readouterr().out.splitlines()
    counted = f'{len(weights)} BF16'
    assert checkpoint.startswith(f'found {tmp_path / "iter_7.pth"}: file, ')
    assert 'iteration 7, ' in checkpoint and checkpoint.endswith(f'; {counted}; DemoCausalLM')
    assert folder.startswith(f'{saved}: LlamaForCausalLM, iter 7, deepspeed ZeRO-3, 2 ranks, {counted}, ')
    assert main([str(saved.parent)]) == 0
    assert capsys.readouterr().out.splitlines() == [folder], 'that no checkpoint lies there is no fault'


def test_what_cannot_be_read_is_told_with_the_rest(tmp_path, capsys):
    (tmp_path / 'iter_7.pth').write_bytes(b'no checkpoint')
    (tmp_path / 'last_checkpoint').write_text('iter_7.pth')
    (tmp_path / 'hf_model').mkdir()
    save_file({'a': torch.zeros(3)}, tmp_path / 'hf_model' / 'model-00001-of-00002.safetensors')
    (tmp_path / 'hf_model' / 'model-00002-of-00002.safetensors').write_bytes(b'damaged')
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert '1 F32' in said.out and 'damaged: ' in said.out
    assert said.err.startswith(f'xhf inspect: {tmp_path / "iter_7.pth"}') and len(said.err.splitlines()) == 1


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
