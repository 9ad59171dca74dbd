"""What transformers 4 does not find, or ties otherwise, in a save of transformers 5 is said before training.

How transformers 4.57 reads such folders was tried with all families that both versions have (docs/versions.md).
"""

from pathlib import Path

import pytest
import transformers

from tests.helpers.models.adapted import adapt, written
from tests.helpers.models.model_folder import rename_tensors
from tests.helpers.models.zoo import MROPE, build, small_config
from xhf_hooks import save_hf
from xhf_hooks.compat.transformers import converts_weights

pytestmark = [
    pytest.mark.modern_only,
    pytest.mark.skipif(not converts_weights(), reason='transformers 4 writes what it reads'),
]

MAE = dict(decoder_hidden_size=40, decoder_num_hidden_layers=2, decoder_num_attention_heads=4)
MAE = {**MAE, 'hidden_size': 40, 'num_attention_heads': 4, 'decoder_intermediate_size': 72}


def told(folder: Path, model: transformers.PreTrainedModel) -> list[str]:
    """The warnings of a save that are about readers."""
    return [line for line in written(folder, model) if 'transformers 4' in line or 'Older versions' in line]


@pytest.mark.parametrize('kind', ['CLIPVisionModel', 'CLIPTextModel', 'SiglipVisionModel'])
def test_a_tower_by_itself(kind, tmp_path):
    (warning,) = told(tmp_path, getattr(transformers, kind)(small_config(kind, {})))
    prefix = 'text_model' if 'Text' in kind else 'vision_model'
    assert f'{kind} was not loaded from a folder with the tensor names of the Hub' in warning
    assert f"(without '{prefix}')" in warning


def test_a_tower_of_another_class_at_a_path_of_that_name(tmp_path):
    """DeepSeek-VL has a SiglipVisionModel as ``vision_model``; CLIPModel has a tower of its own there."""
    kind = 'DeepseekVLForConditionalGeneration'
    text = {'model_type': 'llama', 'tie_word_embeddings': True}
    vision = {'model_type': 'siglip_vision_model'}
    model = transformers.DeepseekVLForConditionalGeneration(
        small_config(kind, {'text_config': text, 'vision_config': vision})
    )
    (warning,) = told(tmp_path / 'deepseek', model)
    assert "(without 'vision_model' in vision_model)" in warning
    assert told(tmp_path / 'clip', build('clip')) == []


def test_a_head_that_is_tied_by_another_config_than_the_text_models(tmp_path):
    """The outer config of InternVL ties by default since transformers 5, that of its text model does not."""
    model = build('internvl')
    (warning,) = told(tmp_path / 'built', model)
    assert warning.startswith('config.json: text_config.tie_word_embeddings is False, but lm_head.weight of InternVL')
    assert 'misses lm_head.weight' in warning and 'set model.config.text_config.tie_word_embeddings to True' in warning
    model.config.text_config.tie_word_embeddings = True
    assert told(tmp_path / 'agreed', model) == []
    model.config.tie_word_embeddings = False
    untied = type(model)(model.config)
    (warning,) = told(tmp_path / 'untied', untied)
    assert 'is True, but lm_head.weight' in warning and 'is not tied' in warning


def test_heads_that_are_what_the_config_says(tmp_path):
    """Also a tied one that an adapter has changed, so that it is tied no longer."""
    for family in ('llama', 'llama_tied', 'qwen2', 't5', 'bert', 'bart', 'gemma3', 'gemma3_untied', 'whisper'):
        assert [line for line in told(tmp_path / family, build(family)) if 'tie' in line] == []
    adapted = adapt(build('qwen2'), r=2, target_modules=['q_proj', 'lm_head'])
    merged = save_hf(adapted, tmp_path / 'merged', lora='merge')
    assert [line for line in merged.warnings if 'transformers 4' in line] == []


def test_experts_that_transformers_5_has_transposed(tmp_path):
    text = {'rope_scaling': {**MROPE['rope_scaling'], 'rope_type': 'default', 'mrope_interleaved': True}}
    text = {**text, 'tie_word_embeddings': False}
    vision = {'num_position_embeddings': 16, 'deepstack_visual_indexes': [0]}
    kind = transformers.Qwen3VLMoeForConditionalGeneration
    model = kind(small_config(kind.__name__, {'text_config': text, 'vision_config': vision}))
    (warning,) = told(tmp_path / 'built', model)
    assert warning.startswith('4 tensors of the save (model.language_model.layers.0.mlp.experts.')
    assert 'it has them transposed' in warning


def test_names_that_are_not_those_of_the_base(tmp_path):
    """transformers 5 writes the layers of ViTMAE's decoder under a name that no version before had."""
    model = transformers.ViTMAEForPreTraining(small_config('ViTMAEForPreTraining', MAE))
    (warning,) = told(tmp_path / 'built', model)
    assert warning.startswith('transformers 4 does not read this vit_mae as it was trained: it finds the layers')
    model.save_pretrained(tmp_path / 'base')
    rename_tensors(tmp_path / 'base', 'decoder.decoder_encoder.layer.', 'decoder.decoder_layers.')
    (warning,) = told(tmp_path / 'loaded', type(model).from_pretrained(tmp_path / 'base'))
    assert warning.startswith('32 tensors of the save have another name than in the base model')
    assert 'is decoder.decoder_layers.0.' in warning


@pytest.mark.parametrize(
    ('family', 'now', 'before'),
    [('bert', 'LayerNorm.weight', 'LayerNorm.gamma'), ('gpt2', 'transformer.', '')],
)
def test_names_of_a_base_that_every_version_reads(family, now, before, tmp_path):
    """Those of bert-base-uncased and gpt2 on the Hub."""
    model = build(family)
    if family == 'gpt2':  # with a head of its own, since a base without any name of the save says nothing
        model.config.tie_word_embeddings = False
        model = type(model)(model.config)
    model.save_pretrained(tmp_path / 'base')
    rename_tensors(tmp_path / 'base', now, before)
    assert told(tmp_path / 'loaded', type(model).from_pretrained(tmp_path / 'base')) == []
    model.config._name_or_path = str(tmp_path / 'base')  # its weights were loaded in another way
    assert told(tmp_path / 'built', model) == []
