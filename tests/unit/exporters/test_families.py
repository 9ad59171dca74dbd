"""Every family of tests/helpers/models/families.py: a save is what the installed ``save_pretrained`` writes.

    python -m pytest -v tests/unit/exporters/test_families.py

It needs no other version than the one installed, and lists what was compared. A family that this version has not is not
among the tests; too few are an error.
"""

import json

import pytest
import torch
import transformers

from tests.helpers.checks.compare import (
    assert_loads_clean,
    assert_same_folder_tensors,
    bytes_in,
    folder_tensors,
    splits_as_the_hub,
)
from tests.helpers.checks.config_fields import assert_same_config
from tests.helpers.models.families import MODELS
from tests.helpers.models.zoo import available, build
from tests.helpers.runs.engines import save_folder
from xhf_hooks.compat.transformers import converts_weights

AVAILABLE = [family for family in MODELS if available(family)]
#: The number of families, from these versions on.
LEAST = {(4, 36): 30, (4, 46): 45, (4, 48): 48, (4, 57): 60, (5, 23): 62}
#: In transformers 5 their experts share memory while save_pretrained splits a model: it puts them into one file.
SPLIT_ELSEWHERE = ('qwen3_moe', 'mixtral', 'deepseek_v3', 'qwen2_moe', 'olmoe', 'phimoe', 'glm4_moe')
WEIGHTS = '*.safetensors'
OTHERS = ('generation_config.json', 'model.safetensors.index.json')


@pytest.mark.parametrize('family', AVAILABLE)
def test_the_folder_is_that_of_save_pretrained(family, tmp_path, caplog):
    caplog.set_level('INFO')
    expected, found = tmp_path / 'expected', tmp_path / 'hf_model'
    model = build(family)
    for parameter in model.parameters():  # not the buffers: DeepSpeed leaves those in fp32, too
        parameter.data = parameter.data.to(torch.bfloat16)
    max_shard_size = model.num_parameters() * 2 // 5
    config, training = model.config.to_dict(), model.config._attn_implementation
    save_folder(model, found, max_shard_size=max_shard_size)
    assert (model.config.to_dict(), model.config._attn_implementation) == (config, training)
    assert 'could not check in advance' not in caplog.text, 'that it will load'

    model.save_pretrained(expected, max_shard_size=max_shard_size)
    assert_same_config(found, expected)
    if not splits_as_the_hub():
        # More than there, as BERT's second bias: a class ties it while it is built, which not each reader does
        tensors, trained = folder_tensors(found), model.state_dict()
        assert tensors.keys() >= folder_tensors(expected).keys()
        assert [name for name, tensor in tensors.items() if not tensor.equal(trained[name])] == []
        assert_loads_clean(found, type(model))
        return
    if family in SPLIT_ELSEWHERE and converts_weights():
        assert_same_folder_tensors(found, expected)
        indexes = [json.loads((folder / OTHERS[-1]).read_text()) for folder in (found, expected)]
        assert indexes[0]['metadata'] == indexes[1]['metadata'] and len(bytes_in(found, WEIGHTS)) > 2
        assert max(path.stat().st_size for path in found.glob(WEIGHTS)) < 1.1 * max_shard_size
        assert_loads_clean(found, type(model))
        return
    for name in OTHERS:
        assert (expected / name).exists() == (found / name).exists(), name
        if (expected / name).exists():
            assert json.loads((found / name).read_text()) == json.loads((expected / name).read_text()), name
    assert (expected / OTHERS[-1]).exists()
    weights, saved = bytes_in(expected, WEIGHTS), bytes_in(found, WEIGHTS)
    assert saved.keys() == weights.keys() and len(weights) > 2
    assert [name for name, data in saved.items() if data != weights[name]] == []
    assert_loads_clean(found, type(model))


def test_enough_families_are_compared():
    version = tuple(map(int, transformers.__version__.split('.')[:2]))
    least = max(number for since, number in LEAST.items() if since <= version)
    assert len(AVAILABLE) >= least, f'transformers {transformers.__version__} lacks {sorted(MODELS.keys() - AVAILABLE)}'
