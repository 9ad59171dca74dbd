"""The trial save: what it finds out, and that it leaves nothing behind."""

from __future__ import annotations

import json
import tempfile
from importlib import util

import pytest
import torch

from tests.helpers.families import MODELS
from tests.helpers.zoo import build
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.huggingface import build_on_meta
from xhf_hooks.exporters.trial_save import index_metadata, saved_names

ONLY_RENAMES = util.find_spec('transformers.core_model_loading') is None  # transformers < 5


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'tmp'))
    (tmp_path / 'tmp').mkdir()
    return tmp_path / 'tmp'


def reference_of(family):
    model = build(family, models=MODELS)
    return build_on_meta(type(model), model.config)


@pytest.mark.parametrize('family', ['llama', 'llama_tied', 't5', 'llava'])
def test_the_index_is_that_of_save_pretrained(family, folder, tmp_path, capfd, caplog):
    model = build(family, models=MODELS)
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    expected = json.loads((tmp_path / 'model.safetensors.index.json').read_text())['metadata']
    reference = build_on_meta(type(model), model.config)
    before = reference.config.to_dict()
    capfd.readouterr()
    caplog.clear()
    found = index_metadata(reference)
    assert {**found, 'total_size': expected['total_size']} == expected
    assert list(folder.glob('xhf_hooks_*')) == [] and capfd.readouterr() == ('', '') and caplog.text == ''
    assert reference.config.to_dict() == before


def test_a_model_that_cannot_be_saved_is_refused(folder, monkeypatch):
    reference = reference_of('llama')

    def fail(*_, **__):
        raise OSError('no space')

    monkeypatch.setattr(type(reference), 'save_pretrained', fail)
    with pytest.raises(ModelError, match=r"save_pretrained of LlamaForCausalLM failed .*OSError\('no space'\)"):
        index_metadata(reference)
    assert list(folder.glob('xhf_hooks_*')) == []


if ONLY_RENAMES:

    @pytest.mark.parametrize('family', ['llama', 'llava', 'qwen2_vl'])
    def test_names_are_those_of_save_pretrained(family, folder, tmp_path, capfd):
        from safetensors import safe_open

        model = build(family, models=MODELS)
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / 'model.safetensors', 'pt') as file:
            expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        capfd.readouterr()
        found = saved_names(reference_of(family), list(model.state_dict()))
        assert (
            found.keys() == expected.keys()
            and list(folder.glob('xhf_hooks_*')) == []
            and capfd.readouterr() == ('', '')
        )
        for hf_name, name in found.items():
            assert torch.equal(model.state_dict()[name], expected[hf_name])
        assert list(found.values()) == list(model.state_dict())

    def test_a_tensor_that_is_not_written_is_refused(monkeypatch):
        reference = reference_of('llama')
        monkeypatch.setattr(type(reference), '_keys_to_ignore_on_save', ['lm_head.weight'])
        with pytest.raises(ModelError, match=r'does not write \S*lm_head.weight'):
            saved_names(reference, ['model.norm.weight', 'lm_head.weight'])
