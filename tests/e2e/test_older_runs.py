"""Runs with transformers 4, converted with the installed version: the tensors that ``save_pretrained`` wrote there."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.checks.converted import convert
from tests.helpers.models.families import MODELS
from tests.helpers.runs.older_transformers import run_with_transformers
from xhf_hooks.offline.commands.convert import main

pytestmark = [pytest.mark.needs('transformers 4'), pytest.mark.modern_only]

#: Not converted: transformers 5 itself does not read what these called their tensors.
REFUSED = ('colpali',)
#: Buffers that the class computes and no longer saves.
COMPUTED = {'swin': 'relative_position_index'}


@pytest.fixture(scope='module')
def runs(tmp_path_factory) -> Path:
    """Of each family ``base``, ``iter_2.pth`` and ``trained``."""
    root = tmp_path_factory.mktemp('older_runs')
    run_with_transformers('4.57.6', 'models/older_runs.py', root)
    return root


#: Families that transformers 4.57 does not have.
NEWER = ('gemma4_text', 'ernie4_5_vl_moe')


@pytest.mark.parametrize('family', [name for name in MODELS if name not in (*REFUSED, *NEWER)])
def test_a_run_of_every_family(runs, family, tmp_path):
    """Mixtral and Qwen-MoE kept each expert apart, and vision towers had another name."""
    folder = runs / family
    out = convert(folder / 'iter_2.pth', tmp_path / 'out', '--base', folder / 'base')
    found, expected = folder_tensors(out), folder_tensors(folder / 'trained')
    left_out = {name for name in expected if family in COMPUTED and COMPUTED[family] in name}
    assert found.keys() == expected.keys() - left_out
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize('family', REFUSED)
def test_a_run_that_only_its_own_version_reads(runs, family, tmp_path, capsys):
    folder = runs / family
    assert main([str(folder / 'iter_2.pth'), str(tmp_path / 'out'), '--base', str(folder / 'base')]) == 2
    assert "pip install 'transformers==4.57.6'" in capsys.readouterr().err


def _names_with(word: str, names: Any) -> list[str]:
    return [name for name in names if word in name]


@pytest.mark.parametrize('family', ['mixtral', 'qwen2_moe', 'llava'])
@pytest.mark.parametrize('mode', ['adapter', 'merge'])
def test_an_adapter_of_an_older_run(runs, family, mode, tmp_path):
    """The whole state dict: what it adapts, and the rest of the base, have the older names."""
    folder = runs / f'{family}_lora'
    out = convert(folder / 'run' / 'iter_2.pth', tmp_path / 'out', '--lora', mode)
    if mode == 'merge':
        found, expected = folder_tensors(out), folder_tensors(folder / 'merged')
        assert found.keys() == expected.keys()
        assert all(torch.allclose(tensor, expected[name], atol=1e-6) for name, tensor in found.items())
        assert all(torch.equal(found[n], expected[n]) for n in _names_with('expert', found)), 'as in the checkpoint'
    else:
        found = folder_tensors(out)
        expected = folder_tensors(folder / 'run')
        assert len(found) == len(expected) and {t.shape for t in found.values()} == {t.shape for t in expected.values()}
        if family != 'llava':  # whose vision tower has another name now
            assert_same_folder_tensors(out, folder / 'run')
