"""Every file that is not weights, and that the live objects it is made from stay as they are."""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoTokenizer,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GenerationConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
)

from tests.helpers.models.adapted import planned
from tests.helpers.models.families import MODELS
from tests.helpers.models.zoo import VISION_TOWER, build
from tests.helpers.models.zoo.llava import tokenizer
from xhf_hooks.compat.transformers import converts_weights
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters import HuggingFaceExporter
from xhf_hooks.exporters.base import find_tokenizer


def written(folder: Path, model, *, dtype: str | None = None, tokenizer=None) -> list[str]:
    """Writes the HF assets as a save does; returns the warnings."""
    folder.mkdir(exist_ok=True)
    return planned(model, dtype).write_hf_assets(folder, tokenizer, ())


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding='utf-8'))


def dtype_of(config: dict) -> str:
    return config.get('dtype', config.get('torch_dtype'))


def with_base(model, folder: Path, **config):
    """Makes ``folder`` the base that ``model`` was loaded from."""
    base = copy.deepcopy(model.config)
    base.update(config)
    base.save_pretrained(folder)
    model.config._name_or_path = str(folder)
    return model


# config.json


def test_dtype_of_parts(tmp_path):
    """A part's own dtype would win over the option when the folder is loaded."""
    model = build('llava')
    for part in (model.config.text_config, model.config.vision_config):
        setattr(part, 'dtype' if hasattr(part, 'dtype') else 'torch_dtype', torch.float32)
    written(tmp_path, model, dtype='BF16')
    config = read_json(tmp_path / 'config.json')
    assert {dtype_of(config), dtype_of(config['text_config']), dtype_of(config['vision_config'])} == {'bfloat16'}


@pytest.mark.parametrize('base', [True, False])
def test_use_cache_as_the_base_had_it(base, tmp_path):
    model = with_base(build('llama'), tmp_path / 'base', use_cache=base)
    model.config.use_cache = False
    written(tmp_path / 'found', model)
    assert AutoConfig.from_pretrained(tmp_path / 'found').use_cache is base


def test_use_cache_of_composite_models(tmp_path):
    """Trainer sets it on the outer config, which has none in the base."""
    model = with_base(build('llava'), tmp_path / 'base')
    before = read_json(tmp_path / 'base' / 'config.json')
    model.config.use_cache = model.config.text_config.use_cache = False
    written(tmp_path / 'found', model)
    found = read_json(tmp_path / 'found' / 'config.json')
    assert found.get('use_cache') == before.get('use_cache')
    assert found['text_config'].get('use_cache', True) is True
    assert (model.config.use_cache, model.config.text_config.use_cache) == (False, False)


def test_use_cache_of_a_class_without_defaults(tmp_path):
    """Such a class says nothing of what it was before, so nothing is written, and readers take their default."""
    model = build('donut', models=MODELS)
    model.config.use_cache = False
    written(tmp_path, model)
    assert 'use_cache' not in read_json(tmp_path / 'config.json')
    assert model.config.use_cache is False


# The vocabulary


def test_a_base_with_more_tokens_than_embeddings(tmp_path):
    """As google/gemma-3-1b-it, whose tokenizer has <image_soft_token>: nothing that training did."""
    model = with_base(build('llama'), tmp_path / 'base')
    rows = model.config.vocab_size
    tokenizer(rows + 1).save_pretrained(tmp_path / 'base')
    own = AutoTokenizer.from_pretrained(tmp_path / 'base')
    assert written(tmp_path / 'found', model, tokenizer=own) == []
    assert len(AutoTokenizer.from_pretrained(tmp_path / 'found')) == rows + 1
    with pytest.raises(ModelError, match=f'has {rows + 2} tokens, but the model has embeddings for {rows}'):
        written(tmp_path / 'more', model, tokenizer=tokenizer(rows + 2))


def test_the_vocabulary_of_the_decoder(tmp_path):
    """Encoder and decoder have vocabularies of their own; an image encoder has none, but it embeds patches."""
    parts = {'encoder': {**MODELS['bert'][1], 'vocab_size': 7}, 'decoder': {**MODELS['bert'][1], 'vocab_size': 131}}
    for part in parts.values():
        part['model_type'] = 'bert'
    text = EncoderDecoderModel(EncoderDecoderConfig(**copy.deepcopy(parts)))
    parts['encoder'] = {**VISION_TOWER, 'model_type': 'clip_vision_model'}
    image = VisionEncoderDecoderModel(VisionEncoderDecoderConfig(**parts))
    for name, model in {'text': text, 'image': image}.items():
        written(tmp_path / name, model, tokenizer=tokenizer(131))
        with pytest.raises(ModelError, match='has 132 tokens, but the model has embeddings for 131'):
            written(tmp_path / f'{name} more', model, tokenizer=tokenizer(132))


# The tokenizer of the run


class Pieces:
    """Encodes, as sentencepiece's SentencePieceProcessor, and does not save."""


@pytest.mark.parametrize('has_base', [True, False])
def test_a_tokenizer_of_another_library(has_base, tmp_path):
    model = with_base(build('llama'), tmp_path / 'base')
    if has_base:
        tokenizer(9).save_pretrained(tmp_path / 'base')
    found, warnings = find_tokenizer(None, Pieces(), HuggingFaceExporter(model, None))
    assert warnings[0] == f"the run's tokenizer is a {__name__}.Pieces, not one of transformers: it is not saved"
    if has_base:
        assert len(found) == 9 and "base' will be saved" in warnings[1]
    else:
        assert found is None and 'no tokenizer will be saved' in warnings[1]
    assert len(warnings) == 2


# generation_config.json


@pytest.mark.parametrize('has_file', [True, False])
def test_what_training_forces_is_as_in_the_base(has_file, tmp_path):
    """Axolotl sets do_sample, and use_cache before it loads the model. Everything else is the user's."""
    model = with_base(build('llama'), tmp_path / 'base')
    GenerationConfig(use_cache=True, bos_token_id=1).save_pretrained(tmp_path / 'base')
    if not has_file:
        (tmp_path / 'base' / 'generation_config.json').unlink()
    model.generation_config = GenerationConfig(do_sample=True, use_cache=False, eos_token_id=[2, 3])
    written(tmp_path / 'forced', model)
    found = GenerationConfig.from_pretrained(tmp_path / 'forced')
    assert not found.do_sample and found.use_cache is not False and found.eos_token_id == [2, 3]
    model.generation_config.temperature = 0.5
    written(tmp_path / 'chosen', model)
    found = GenerationConfig.from_pretrained(tmp_path / 'chosen')
    assert found.do_sample is True and found.temperature == 0.5


def test_sampling_options_without_sampling_are_repaired(tmp_path):
    """The base models of many published fine-tunes have this; save_pretrained raises on it."""
    model = build('llama')
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.5
    before = model.generation_config.to_dict()
    with pytest.raises(ValueError, match='temperature'):
        copy.deepcopy(model.generation_config).save_pretrained(tmp_path / 'refused')
    (warning,) = written(tmp_path / 'found', model)
    assert 'do_sample was set to True' in warning and 'temperature' in warning
    found = GenerationConfig.from_pretrained(tmp_path / 'found')
    assert (found.do_sample, found.temperature) == (True, 0.5)
    assert model.generation_config.to_dict() == before


def test_the_generation_config_that_ms_swift_keeps(tmp_path):
    """ms-swift trains with settings for its own inference, and saves the original (its ``trainers/mixin.py``)."""
    model = build('llama')
    model.origin_generation_config = GenerationConfig(do_sample=True, temperature=0.5, eos_token_id=2)
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=64, eos_token_id=2)
    assert written(tmp_path, model) == []
    found = GenerationConfig.from_pretrained(tmp_path)
    assert (found.do_sample, found.temperature, found.max_new_tokens, found.eos_token_id) == (True, 0.5, None, 2)
    assert (model.generation_config.do_sample, model.origin_generation_config.eos_token_id) == (False, 2)


def test_invalid_generation_config_is_left_out(tmp_path):
    model = build('llama')
    model.generation_config.num_beams, model.generation_config.num_return_sequences = 1, 4
    model.generation_config.do_sample = False
    model.generation_config.early_stopping = 'perhaps'
    before = model.generation_config.to_dict()
    (warning,) = written(tmp_path, model)
    assert 'was not written' in warning
    assert not (tmp_path / 'generation_config.json').exists()
    assert (tmp_path / 'config.json').exists()
    assert model.generation_config.to_dict() == before


# Tokenizer and processor


def test_processor_files_come_from_the_base(tmp_path):
    model, words = with_base(build('llava'), tmp_path / 'base'), tokenizer()
    words.save_pretrained(tmp_path / 'base')
    names = {'preprocessor_config.json', 'processor_config.json', 'chat_template.json'}
    for name in (*names, 'README.md'):
        (tmp_path / 'base' / name).write_text('"base"')

    def of_base(folder: str) -> set[str]:
        written(tmp_path / folder, model, tokenizer=words)
        return {path.name for path in (tmp_path / folder).iterdir() if path.read_text() == '"base"'}

    assert of_base('found') == names
    words.chat_template = 'replaced'
    assert of_base('replaced') == names - {'chat_template.json'}

    class Processor:
        def save_pretrained(self, folder):
            (Path(folder) / 'preprocessor_config.json').write_text('"own"')

    written(tmp_path / 'found', model, tokenizer=Processor())
    assert read_json(tmp_path / 'found' / 'preprocessor_config.json') == 'own'


def test_settings_of_generation_in_the_config_are_where_save_pretrained_puts_them(tmp_path):
    """Scripts set them there, as those of BART and TrOCR do. transformers 4 moves them when it saves."""
    model = build('t5')
    model.config.max_length, model.config.num_beams = 64, 4
    if converts_weights():  # transformers 5 refuses them
        with pytest.raises(ValueError, match='Generation parameters found'):
            written(tmp_path / 'found', model)
        return
    written(tmp_path / 'found', model)
    assert (model.config.max_length, model.config.num_beams) == (64, 4)
    model.save_pretrained(tmp_path / 'expected')
    for name in ('config.json', 'generation_config.json'):
        found, expected = (read_json(tmp_path / which / name) for which in ('found', 'expected'))
        for field in ('max_length', 'num_beams'):
            assert found.get(field) == expected.get(field)


def test_the_dtype_of_a_merged_model_is_that_of_what_is_written(tmp_path):
    """Trained copies in fp32 of a bf16 model, as LLaMA-Factory makes them."""
    model = build('llama').to(torch.bfloat16)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=['q_proj'], modules_to_save=['embed_tokens']))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    exporter = planned(adapted, lora='merge')
    exporter.write_hf_assets(tmp_path, None, ())
    adapted.merge_and_unload().save_pretrained(tmp_path / 'expected')
    found, expected = (dtype_of(read_json(folder / 'config.json')) for folder in (tmp_path, tmp_path / 'expected'))
    assert found == expected == 'float32'
