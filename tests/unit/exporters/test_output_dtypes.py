"""The option dtype against transformers itself: what a class keeps in fp32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.helpers.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.zoo import available, build
from xhf_hooks import save_hf

FAMILIES = [family for family in ('t5', 'deepseek_v3', 'llama', 'qwen3_moe') if available(family)]


def dtypes_of(folder: Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in folder_tensors(folder).items()}


def fp32_names(folder: Path) -> set[str]:
    return {name for name, dtype in dtypes_of(folder).items() if dtype == torch.float32}


def config_dtype(folder: Path) -> str:
    config = json.loads((folder / 'config.json').read_text())
    return config.get('dtype', config.get('torch_dtype'))


def reference(family: str, dtype: str, folder: Path) -> Path:
    """What users of save_pretrained get: load the fp32 folder with this dtype, and save."""
    model = build(family)
    model.save_pretrained(folder / 'fp32')
    loaded = type(model).from_pretrained(folder / 'fp32', torch_dtype=getattr(torch, dtype))
    loaded.save_pretrained(folder / 'reference')
    return folder / 'reference'


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('family', FAMILIES)
def test_kept_in_fp32_as_by_from_pretrained(family, dtype, tmp_path):
    expected = reference(family, dtype, tmp_path)
    model = type(build(family)).from_pretrained(tmp_path / 'fp32', torch_dtype=torch.float32)
    save_hf(model, tmp_path / 'hf_model', dtype=dtype)
    assert_same_folder_tensors(tmp_path / 'hf_model', expected)
    assert config_dtype(tmp_path / 'hf_model') == config_dtype(expected) == dtype


@pytest.mark.modern_only
@pytest.mark.parametrize('trained', ['float32', 'bfloat16'])
def test_deepseek_v3_keeps_its_bias_whatever_the_dtype_of_training(trained, tmp_path):
    """DeepSpeed casts buffers, too; a bias that was rounded in training is widened."""
    model = build('deepseek_v3').to(getattr(torch, trained))
    save_hf(model, tmp_path / 'hf_model', dtype='bfloat16')
    kept = fp32_names(tmp_path / 'hf_model')
    assert kept == fp32_names(reference('deepseek_v3', 'bfloat16', tmp_path))
    if not kept and transformers.__version__.startswith('4.'):  # its from_pretrained keeps parameters, but no buffers
        return
    assert kept == {'model.layers.1.mlp.gate.e_score_correction_bias'}
    found = folder_tensors(tmp_path / 'hf_model')[next(iter(kept))]
    assert torch.equal(found, model.model.layers[1].mlp.gate.e_score_correction_bias.float())


def test_float32_and_the_dtype_of_training_are_as_before(tmp_path):
    save_hf(build('t5').half(), tmp_path / 'trained')
    assert set(dtypes_of(tmp_path / 'trained').values()) == {torch.float16}
    save_hf(build('t5').half(), tmp_path / 'wide', dtype='float32')
    assert set(dtypes_of(tmp_path / 'wide').values()) == {torch.float32}
