"""What xhf-convert says of a checkpoint without masters, or whose files tell nothing of themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.compare import folder_tensors
from tests.helpers.made_checkpoint import MadeCheckpoint
from tests.helpers.zoo import build
from tests.unit.sources.test_checkpoint_evidence import BY_NAME, MODEL, edit, forget_names, optim, swap
from xhf_hooks.cli.convert import BAD_INPUT, DONE, main

WIDENED = 'have no fp32 master weights in this checkpoint; their 16-bit weights are widened'
FROZEN = 'model.layers.1.'


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp('model') / 'base'
    build('qwen2').save_pretrained(folder)
    return folder


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(p.shape, generator=generator) for name, p in build('qwen2').named_parameters()}


def made(frozen: bool = False, **options: object) -> MadeCheckpoint:
    masters = {name: tensor for name, tensor in weights().items() if not (frozen and name.startswith(FROZEN))}
    kept = {name: tensor.bfloat16() for name, tensor in weights().items() if name not in masters}
    shared = {'lm_head.weight': 'model.embed_tokens.weight'}
    return MadeCheckpoint(masters=masters, frozen=kept, shared=shared, dtype=torch.bfloat16, **options)


def facts(folder: Path) -> dict:
    return json.loads((folder / 'xhf_manifest.json').read_text())


@pytest.mark.parametrize('frozen', [False, True])
@pytest.mark.parametrize('stage', [1, 2, 3])
def test_masters_are_there(base, tmp_path, capsys, stage, frozen):
    """Frozen weights never had any: nothing is lost."""
    checkpoint = made(frozen, stage=stage)
    folder = checkpoint.write(tmp_path / 'x')
    assert main([str(folder), str(tmp_path / 'out'), '--base', str(base), '--dtype', 'float32']) == DONE
    said = capsys.readouterr()
    assert 'widened' not in said.out + said.err and BY_NAME not in said.out
    assert 'widened_tensors' not in facts(tmp_path / 'out')
    expected = {**checkpoint.masters, **{name: tensor.float() for name, tensor in checkpoint.frozen.items()}}
    found = folder_tensors(tmp_path / 'out')
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def without_optimizer(folder: Path) -> Path:
    checkpoint = made(stage=1).write(folder / 'x')
    for file in checkpoint.glob('*optim_states.pt'):
        file.unlink()
    return checkpoint


def without_zero(folder: Path) -> Path:
    checkpoint = without_optimizer(folder)
    edit(checkpoint, MODEL, lambda state: state.update(param_shapes=None))
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
    for dtype in ('keep', 'bfloat16', 'float16'):
        assert main([str(checkpoint), str(tmp_path / dtype), '--base', str(base), '--dtype', dtype]) == DONE
        said = capsys.readouterr()
        assert 'widened' not in said.out + said.err


def test_a_model_that_was_trained_in_fp32_loses_nothing(base, tmp_path, capsys):
    torch.save({'state_dict': weights()}, tmp_path / 'x.pth')
    assert main([str(tmp_path / 'x.pth'), str(tmp_path / 'out'), '--base', str(base), '--dtype', 'float32']) == DONE
    said = capsys.readouterr()
    assert 'widened' not in said.out + said.err


@pytest.mark.parametrize('stage', [1, 2, 3])
def test_files_that_tell_nothing_of_themselves(base, tmp_path, capsys, stage):
    folder = made(stage=stage).write(tmp_path / 'x')
    for expected in (False, True):
        assert main([str(folder), str(tmp_path / 'out'), '--base', str(base), '--dry-run']) == DONE
        assert (BY_NAME in capsys.readouterr().out) == expected
        forget_names(folder)


@pytest.mark.parametrize('dtype', ['keep', 'float32'])
def test_refusals_are_one_line(base, tmp_path, capsys, dtype):
    options = [str(tmp_path / 'out'), '--base', str(base), '--dtype', dtype]
    swapped = made(stage=3).write(tmp_path / 'swapped')
    swap(swapped, optim(0), optim(1))
    assert main([str(swapped), *options]) == BAD_INPUT
    assert len(capsys.readouterr().err.splitlines()) == 1 and not (tmp_path / 'out').exists()
    stale = made(stage=3, optimizer_step=2).write(tmp_path / 'stale')
    assert main([str(stale), *options]) == DONE
    assert 'has made 2 steps' in capsys.readouterr().out
