"""What xhf-convert says of a checkpoint without masters, or whose files tell nothing of themselves."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.checks.compare import folder_tensors
from tests.helpers.models.zoo import build
from tests.helpers.runs.made_checkpoint import MadeCheckpoint
from xhf_hooks.cli.convert import DONE, main

BY_NAME = 'not verifiable: only the file names say which rank wrote which file'
WIDENED = 'have no fp32 master weights in this checkpoint; their 16-bit weights are widened'


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp('model') / 'base'
    build('qwen2').save_pretrained(folder)
    return folder


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(p.shape, generator=generator) for name, p in build('qwen2').named_parameters()}


def made(stage: int = 1) -> MadeCheckpoint:
    shared = {'lm_head.weight': 'model.embed_tokens.weight'}
    return MadeCheckpoint(masters=weights(), shared=shared, dtype=torch.bfloat16, stage=stage)


def facts(folder: Path) -> dict:
    return json.loads((folder / 'xhf_manifest.json').read_text())


def without_optimizer(folder: Path) -> Path:
    checkpoint = made().write(folder / 'x')
    for file in checkpoint.glob('*optim_states.pt'):
        file.unlink()
    return checkpoint


def without_zero(folder: Path) -> Path:
    checkpoint = without_optimizer(folder)
    (file,) = checkpoint.iterdir()
    torch.save({**torch.load(file, weights_only=False), 'param_shapes': None}, file)
    return checkpoint


def one_file(folder: Path) -> Path:
    torch.save({'state_dict': made().as_trained}, folder / 'x.pth')
    return folder / 'x.pth'


@pytest.mark.parametrize('make', [without_optimizer, without_zero, one_file])
def test_no_masters_are_there(base, tmp_path, capsys, make):
    checkpoint = make(tmp_path)
    n_tensors = len(weights())
    line = f'float32: {n_tensors} of {n_tensors} tensors {WIDENED}'
    options = ['--base', str(base), '--dtype', 'float32']
    assert main([str(checkpoint), str(tmp_path / 'dry'), *options, '--dry-run']) == DONE
    assert line in capsys.readouterr().out.splitlines()
    assert main([str(checkpoint), str(tmp_path / 'out'), *options]) == DONE
    said = capsys.readouterr()
    assert line in said.out.splitlines() and said.err.splitlines()[-1] == f'xhf-convert: note: {line}'
    assert facts(tmp_path / 'out')['widened_tensors'] == n_tensors
    found = folder_tensors(tmp_path / 'out')
    assert all(torch.equal(found[name], tensor.bfloat16().float()) for name, tensor in weights().items())
    assert main([str(checkpoint), str(tmp_path / 'half'), '--base', str(base), '--dtype', 'float16']) == DONE
    said = capsys.readouterr()
    assert 'widened' not in said.out + said.err


def test_files_that_tell_nothing_of_themselves(base, tmp_path, capsys):
    folder = made(stage=3).write(tmp_path / 'x')
    for expected in (False, True):
        assert main([str(folder), str(tmp_path / 'out'), '--base', str(base), '--dry-run']) == DONE
        assert (BY_NAME in capsys.readouterr().out) == expected
        for file in folder.iterdir():
            state = torch.load(file, weights_only=False)
            with file.open('wb') as stream:  # then the file does not name itself
                torch.save(state, stream)
