"""Two models: identical, the same but for rounding, or different, with the numbers that show it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models.model_folder import save_model
from xhf_hooks.convert import ConvertOptions
from xhf_hooks.errors import CheckpointError
from xhf_hooks.verify.compare import DIFFERENT, IDENTICAL, ROUNDING, Comparison, compare_models
from xhf_hooks.verify.models import open_models

WEIGHTS = 'model.safetensors'
NAME = 'model.layers.1.mlp.up_proj.weight'


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return save_model('llama', tmp_path_factory.mktemp('model') / 'model')


def compared(a: Path, b: Path, **options: object) -> Comparison:
    return compare_models(*open_models(a, b, ConvertOptions(**options)), workers=2)


def changed(model: Path, folder: Path, **options: object) -> Path:
    """A copy with other tensors: all ``cast``, all ``through`` another type, one ``edit``-ed, one ``drop``-ped."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / WEIGHTS)
    if 'cast' in options:
        tensors = {name: tensor.to(options['cast']) for name, tensor in tensors.items()}
    if 'through' in options:
        tensors = {name: tensor.to(options['through']).to(tensor.dtype) for name, tensor in tensors.items()}
    if 'edit' in options:
        tensors[NAME] = options['edit'](tensors[NAME].clone())
    if 'drop' in options:
        del tensors[NAME]
    save_file(tensors, folder / WEIGHTS, {'format': 'pt'})
    return folder


def test_shards_do_not_matter(model, tmp_path):
    save_model('llama', tmp_path / 'shards', max_shard_size='100KB')
    assert len(list((tmp_path / 'shards').glob('*.safetensors'))) > 1
    found = compared(model, tmp_path / 'shards')
    assert found.verdict == IDENTICAL and found.count(IDENTICAL) == len(load_file(model / WEIGHTS))
    assert found.read_nbytes == 2 * sum(tensor.nbytes for tensor in load_file(model / WEIGHTS).values())
    assert compared(model / WEIGHTS, tmp_path / 'shards').verdict == IDENTICAL


@pytest.mark.parametrize(('dtype', 'swap'), [(torch.bfloat16, False), (torch.float16, True)])
def test_a_cast_is_rounding(model, tmp_path, dtype, swap):
    pair = [model, changed(model, tmp_path / 'b', cast=dtype)]
    found = compared(*(reversed(pair) if swap else pair))
    assert found.verdict == ROUNDING and found.count(ROUNDING) == len(found.tensors)
    assert 0.4 < max(tensor.found.max_ulps for tensor in found.tensors) <= 0.5
    code = {torch.bfloat16: 'BF16', torch.float16: 'F16'}[dtype]
    assert {tensor.through for tensor in found.tensors} == {code}


def test_a_hidden_cast_is_found(model, tmp_path):
    """fp32 numbers that were first rounded, as xtuner's pth_to_hf --fp32 stores: 1e-4 apart, and proven the same."""
    found = compared(model, changed(model, tmp_path / 'b', through=torch.float16))
    assert found.verdict == ROUNDING and found.count(ROUNDING) == len(found.tensors)
    assert all(tensor.ulp_of == 'F32' and tensor.found.max_ulps > 100 for tensor in found.tensors)


def bump(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(-1)
    flat[7] = torch.nextafter(flat[7], torch.tensor(9.0, dtype=tensor.dtype))
    return tensor


@pytest.mark.parametrize('options', [{}, {'cast': torch.bfloat16}, {'through': torch.float16}])
def test_one_unit_in_one_element_is_a_difference(model, tmp_path, options):
    """Whatever else was rounded: of the narrower type one more unit is no rounding."""
    found = compared(model, changed(model, tmp_path / 'b', **options, edit=bump))
    assert found.verdict == DIFFERENT and found.count(DIFFERENT) == 1
    worst = found.tensors[0]
    assert worst.name == NAME and worst.verdict == DIFFERENT
    if not options:
        assert (worst.found.n_differ, worst.found.max_ulps) == (1, 1.0)


def test_missing_extra_and_other_shapes(model, tmp_path):
    less = changed(model, tmp_path / 'less', drop=True)
    assert compared(model, less).missing == [NAME] and compared(less, model).extra == [NAME]
    assert compared(model, less).verdict == DIFFERENT
    found = compared(model, changed(model, tmp_path / 'shape', edit=lambda tensor: tensor[:-1].contiguous()))
    assert found.tensors[0].verdict == DIFFERENT and 'shapes' in found.tensors[0].reason


def test_tensors_larger_than_what_is_read_at_once(tmp_path):
    """The last element counts; empty ones and scalars do no harm."""
    big = torch.randn(5_000_000)
    for folder, value in (('a', 1.0), ('b', 1.0), ('c', 2.0)):
        (tmp_path / folder).mkdir()
        big[-1] = value
        save_file({'big': big, 'empty': torch.zeros(0, 3), 'one': torch.ones(())}, tmp_path / folder / WEIGHTS)
    assert compared(tmp_path / 'a', tmp_path / 'b').verdict == IDENTICAL
    found = compared(tmp_path / 'a', tmp_path / 'c')
    assert (found.tensors[0].found.n_differ, found.tensors[0].found.max_abs, found.count(DIFFERENT)) == (1, 1.0, 1)


def test_experts_that_are_made_of_one_tensor(tmp_path):
    """transformers 5 trains them fused and saves them apart: compared as converted."""
    from tests.helpers.models.zoo import build

    model = build('mixtral')
    model.save_pretrained(tmp_path / 'model')
    torch.save({f'llm.{name}': tensor for name, tensor in model.state_dict().items()}, tmp_path / 'weights.pth')
    found = compared(tmp_path / 'model', tmp_path / 'weights.pth', base=str(tmp_path / 'model'))
    assert found.verdict == IDENTICAL and len(found.tensors) == len(load_file(tmp_path / 'model' / WEIGHTS))
    with pytest.raises(CheckpointError, match='convert one of them with xhf-convert first'):
        compared(tmp_path / 'weights.pth', tmp_path / 'weights.pth')
