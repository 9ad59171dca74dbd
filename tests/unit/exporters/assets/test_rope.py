"""The fields of config.json for transformers 4: what is added, and that transformers 5 reads the same as before."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers.checks.config_fields import config_fields
from tests.helpers.models.adapted import written
from tests.helpers.models.families import MODELS
from tests.helpers.models.model_folder import edit_tensors, with_base, with_whole_base
from tests.helpers.models.zoo import build, small_config
from xhf_hooks.compat.transformers import converts_weights
from xhf_hooks.exporters.hf_assets import write_config

pytestmark = [
    pytest.mark.modern_only,
    pytest.mark.skipif(not converts_weights(), reason='transformers 4 has no rope_parameters'),
]

FREQUENCIES = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 16}
LLAMA_3 = {'rope_type': 'llama3', 'factor': 8.0, **FREQUENCIES}
YARN = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 16, 'beta_fast': 16}
LINEAR, DYNAMIC = ({'rope_type': kind, 'factor': 2.0} for kind in ('linear', 'dynamic'))
SHORT_AND_LONG = {'short_factor': [1.0, 1.5, 2.0, 2.5, 3.0], 'long_factor': [2.0] * 5}
LONG = {'type': 'longrope', **SHORT_AND_LONG}
SECTIONS = {'type': 'mrope', 'rope_type': 'default', 'mrope_section': [1, 2, 2]}

#: Family, changes of ``rope_parameters``, what is added beside theta.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    'default': ('qwen2', {}, {}),
    'llama3': ('llama', LLAMA_3, {'rope_scaling': LLAMA_3}),
    'yarn': ('qwen2', YARN, {'rope_scaling': YARN}),
    'linear': ('llama', LINEAR, {'rope_scaling': LINEAR}),
    'dynamic': ('qwen2', DYNAMIC, {'rope_scaling': DYNAMIC}),
    'longrope': ('phi3', {'rope_type': 'longrope', **LONG}, {'rope_scaling': LONG}),
    'other names': ('gpt_neox', {'partial_rotary_factor': 0.5}, {'rotary_pct': 0.5}),
    'part': ('llava', LINEAR, {'rope_scaling': LINEAR}),
    'sections': ('qwen2_vl', {}, {'rope_scaling': SECTIONS}),
}


def saved(folder: Path, family: str, **rope: Any) -> tuple[dict[str, Any], list[str]]:
    """The added fields of the (text) config, and the warnings of RoPE; the class must read what it read before."""
    folder.mkdir(exist_ok=True)
    model = build(family)
    text = model.config.get_text_config()
    text.rope_parameters = {**text.rope_parameters, **rope}
    text.standardize_rope_params()
    warnings = [line for line in written(folder / 'found', model) if 'rope' in line]
    model.save_pretrained(folder / 'expected')
    read = [type(model.config).from_pretrained(folder / name).to_dict() for name in ('found', 'expected')]
    assert read[0] == read[1]
    fields, before = config_fields(folder / 'found'), config_fields(folder / 'expected')
    assert config_fields(folder / 'found', folder / 'expected') == before
    fields, before = fields.get('text_config', fields), before.get('text_config', before)
    return {name: value for name, value in fields.items() if name not in before}, warnings


@pytest.mark.parametrize('case', CASES)
def test_one_rope(case, tmp_path):
    family, rope, added = CASES[case]
    theta = 'rotary_emb_base' if family == 'gpt_neox' else 'rope_theta'
    assert saved(tmp_path, family, rope_theta=5e5, **rope) == ({theta: 5e5, **added}, [])


def test_global_and_local_rope(tmp_path):
    full, sliding = {**LINEAR, 'rope_theta': 5e5}, {'rope_type': 'default', 'rope_theta': 2e4}
    added, warnings = saved(tmp_path, 'gemma3', full_attention=full, sliding_attention=sliding)
    assert added == {'rope_theta': 5e5, 'rope_local_base_freq': 2e4, 'rope_scaling': LINEAR} and warnings == []


def test_rope_that_transformers_4_has_no_words_for(tmp_path):
    """A scaled local RoPE; a share that transformers 5 would read into another field; two names that disagree."""
    full, sliding = {'rope_type': 'default', 'rope_theta': 5e5}, {**LINEAR, 'rope_theta': 2e4}
    added, (warning,) = saved(tmp_path / 'local', 'gemma3_text', full_attention=full, sliding_attention=sliding)
    assert added == {} and 'transformers 4 ignores rope_parameters' in warning
    added, (warning,) = saved(tmp_path / 'share', 'phi3', partial_rotary_factor=0.6)
    assert added == {} and 'Phi3Config' in warning
    added, (warning,) = saved(tmp_path / 'names', 'qwen2_vl', **LINEAR)  # beside type='mrope'
    assert added == {} and 'text_config.rope_parameters' in warning


def test_a_field_that_is_there_is_not_replaced(tmp_path):
    model = build('llama')
    model.config.rope_theta = 7.0  # transformers 5 ignores it
    (warning,) = written(tmp_path, model)
    assert config_fields(tmp_path)['rope_theta'] == 7.0 and 'ignores rope_parameters' in warning


def test_no_warning_of_a_rope_that_no_class_reads(tmp_path):
    """transformers 4.57 wrote the one of Qwen2-VL's text_config beside it, too, without theta."""
    model = build('qwen2_vl')
    model.config.rope_parameters = {'mrope_section': [1, 2, 2], 'rope_type': 'default', 'type': 'default'}
    assert written(tmp_path, model) == []
    assert (
        config_fields(tmp_path)['text_config']['rope_theta'] == model.config.text_config.rope_parameters['rope_theta']
    )


def test_a_config_that_holds_an_infinite_number(tmp_path):
    """As those of FalconH1, Bamba and GraniteMoeHybrid: JSON has none, so transformers writes it in words."""
    config = transformers.FalconH1Config(rope_parameters={'rope_type': 'default', 'rope_theta': 1e11})
    assert write_config(tmp_path, config) == [] and config_fields(tmp_path)['rope_theta'] == 1e11


# Fields of the base


def test_what_the_base_calls_otherwise_is_kept_unless_training_has_changed_it(tmp_path):
    model = with_base(build('qwen3_moe'), tmp_path / 'base')
    experts = model.config.num_local_experts
    fields = config_fields(tmp_path / 'base')
    rope = fields.pop('rope_parameters')
    older = {'rope_theta': rope['rope_theta'], 'rope_scaling': None, 'num_experts': fields.pop('num_local_experts')}
    (tmp_path / 'base' / 'config.json').write_text(json.dumps({**fields, **older, 'attention_dropout': 0.5}))
    assert [line for line in written(tmp_path / 'same', model) if 'rope' in line] == []
    found = config_fields(tmp_path / 'same')
    assert {name: found.get(name, 'missing') for name in older} == older and found['num_local_experts'] == experts
    assert found['attention_dropout'] == model.config.attention_dropout  # which training has changed
    model.config.rope_parameters['rope_theta'] = 5e5
    written(tmp_path / 'changed', model)
    assert config_fields(tmp_path / 'changed')['rope_theta'] == 5e5
    assert type(model.config).from_pretrained(tmp_path / 'changed').rope_parameters['rope_theta'] == 5e5


def test_the_number_of_experts_without_a_base(tmp_path):
    """4.57 knows num_experts alone, and would build 128."""
    model = build('qwen3_moe')
    written(tmp_path / 'found', model)
    found = config_fields(tmp_path / 'found')
    assert found['num_experts'] == found['num_local_experts'] == model.config.num_local_experts


def test_kinds_of_layers_without_a_base(tmp_path):
    """4.57 knows mamba and attention alone for GraniteMoeHybrid. Qwen3-Next has the present words there."""
    kinds = ['linear_attention', 'full_attention']
    for kind, expected in (('GraniteMoeHybrid', ['mamba', 'attention']), ('Qwen3Next', kinds)):
        config = getattr(transformers, f'{kind}Config')(num_hidden_layers=2, layer_types=kinds)
        assert not [line for line in write_config(tmp_path, config) if 'layer' in line]
        assert config_fields(tmp_path)['layer_types'] == expected
        assert type(config).from_pretrained(tmp_path).layer_types == kinds


def test_models_that_transformers_4_reads_otherwise(tmp_path):
    """Nothing in the installed version says so, but a base shows how its fields were before."""
    said = 'transformers 4 does not read this mt5 as it was trained: it scales what the head gets. Read the save with'
    model = build('umt5')
    assert [line for line in written(tmp_path / 'umt5', model) if 'transformers 4' in line] == []
    model = transformers.MT5ForConditionalGeneration(small_config('MT5ForConditionalGeneration', MODELS['umt5'][1]))
    (warning,) = [line for line in written(tmp_path / 'built', model) if 'transformers 4' in line]
    assert warning.startswith(said)
    model.save_pretrained(tmp_path / 'base')
    loaded = type(model).from_pretrained(tmp_path / 'base')
    assert [line for line in written(tmp_path / 'loaded', loaded) if 'transformers 4' in line] == []
    of_dbrx = write_config(tmp_path, transformers.DbrxConfig())
    assert 'this dbrx as it was trained: it refuses fields' in of_dbrx[-1]


def test_two_thetas_where_transformers_4_has_one(tmp_path):
    """OLMo 3 takes one theta in 4.57."""
    for local, is_told in ((5e5, False), (1e4, True)):
        rope = {'full_attention': {'rope_type': 'default', 'rope_theta': 5e5}}
        rope['sliding_attention'] = {'rope_type': 'default', 'rope_theta': local}
        warnings = write_config(tmp_path, transformers.Olmo3Config(num_hidden_layers=4, rope_parameters=rope))
        assert bool(warnings) == is_told
        assert config_fields(tmp_path).get('rope_theta') == (None if is_told else 5e5)


def test_tensors_in_another_form_than_in_the_base_are_named(tmp_path):
    """As the experts of Qwen3-VL-MoE, which transformers 5 saves transposed."""
    model, name = with_whole_base(build('llama'), tmp_path / 'base'), 'model.layers.0.mlp.up_proj.weight'

    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        embeddings = tensors['model.embed_tokens.weight'][1:]  # rows may differ
        return {**tensors, name: tensors[name].T.contiguous(), 'model.embed_tokens.weight': embeddings}

    edit_tensors(tmp_path / 'base', changed)
    (warning,) = (line for line in written(tmp_path / 'found', model) if 'shape' in line)
    shape = tuple(model.get_parameter(name).shape)
    assert warning.startswith(
        f"1 tensor of the save has another shape than in the base model '{tmp_path}/base': {name} ("
    )
    assert f'({shape}, in the base {shape[::-1]})' in warning and transformers.__version__ in warning
