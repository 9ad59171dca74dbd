"""Every file that is not weights, and that the live objects it is made from stay as they are."""

import copy
import json
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    EncoderDecoderModel,
    GenerationConfig,
    LlamaForCausalLM,
    Pix2StructConfig,
    Pix2StructForConditionalGeneration,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from tests.helpers.checks.compare import assert_same_tensors, folder_tensors
from tests.helpers.checks.config_fields import dtype_in
from tests.helpers.checks.converted import assert_same_files
from tests.helpers.models.adapted import adapted, around, planned, written
from tests.helpers.models.families import MODELS
from tests.helpers.models.model_folder import edit_json, edit_tensors, with_base, with_whole_base
from tests.helpers.models.own_classes import WithMore
from tests.helpers.models.remote_code import use_hub_cache
from tests.helpers.models.sentences import WEIGHTS, First, Halved, Pooling, Projection, Sentences
from tests.helpers.models.zoo import ODD_ENCODER, VISION_TOWER, build, small_config
from tests.helpers.models.zoo.llava import tokenizer
from xhf_hooks import save_hf
from xhf_hooks.compat.transformers import converts_weights
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters import HuggingFaceExporter
from xhf_hooks.exporters.assets.base_files import base_dirs_of
from xhf_hooks.exporters.assets.find_tokenizer import find_tokenizer
from xhf_hooks.exporters.base import ExportRequest
from xhf_hooks.offline.commands.verify import main as verify
from xhf_hooks.sources import source_for


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding='utf-8'))


# config.json


def test_dtype_of_parts(tmp_path):
    """A part's own dtype would win over the option when the folder is loaded."""
    model = build('llava')
    field = 'dtype' if hasattr(model.config.text_config, 'dtype') else 'torch_dtype'
    for part in (model.config.text_config, model.config.vision_config):
        setattr(part, field, torch.float32)
    written(tmp_path, model, dtype='BF16')
    config = read_json(tmp_path / 'config.json')
    assert {part[field] for part in (config, config['text_config'], config['vision_config'])} == {'bfloat16'}


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
    model = build('donut')
    model.config.use_cache = False
    written(tmp_path, model)
    assert 'use_cache' not in read_json(tmp_path / 'config.json')
    assert model.config.use_cache is False


def test_use_cache_of_a_part_is_the_default_of_its_class(tmp_path):
    """Pix2Struct's text model does not cache unless it is told to; save_pretrained writes that."""
    part = dict(hidden_size=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    vision = dict(
        hidden_size=32, patch_embed_hidden_size=32, d_ff=48, d_kv=8, num_hidden_layers=1, num_attention_heads=4
    )
    config = Pix2StructConfig(text_config={'vocab_size': 131, **part}, vision_config=vision)
    model = Pix2StructForConditionalGeneration(config)
    written(tmp_path / 'found', model)
    model.config.save_pretrained(tmp_path / 'expected')
    parts = [read_json(tmp_path / at / 'config.json')['text_config'] for at in ('found', 'expected')]
    found, expected = (part.get('use_cache') for part in parts)
    assert found == expected and not found


class WithoutTrial(LlamaForCausalLM):
    def save_pretrained(self, folder, **options):
        raise RuntimeError('no weights')


def test_what_the_class_writes_besides_weights(tmp_path):
    model = WithMore(small_config(*MODELS['llama']))
    before = model.config.to_dict()
    assert written(tmp_path / 'found', model) == []
    assert model.config.to_dict() == before
    model.save_pretrained(tmp_path / 'expected')
    names = [
        {path.relative_to(at) for path in at.rglob('*.json')} for at in (tmp_path / 'found', tmp_path / 'expected')
    ]
    assert names[0] == names[1] and (tmp_path / 'found' / 'more' / 'settings.json').read_text() == '"own"'
    found, expected = (read_json(tmp_path / at / 'config.json') for at in ('found', 'expected'))
    assert {name: found.get(name) for name in expected} == expected and expected['special'] == 'own'


def test_a_save_of_the_class_that_cannot_be_tried(tmp_path):
    (warning,) = written(tmp_path, WithoutTrial(small_config(*MODELS['llama'])))
    assert warning == (
        'WithoutTrial has a save_pretrained of its own, which could not be run without weights '
        '(RuntimeError: no weights): files that it writes besides the weights may be missing'
    )


# What surrounds the model, and what lies beside it in the base


@pytest.mark.parametrize('with_weights', [None, Projection, Halved])
def test_what_surrounds_the_exported_model(with_weights, tmp_path):
    words = tokenizer()
    whole = Sentences(First(build('llama'), words), Pooling(), *([with_weights(4, 4)] if with_weights else []))
    before = {name: dict(vars(module)) for name, module in whole.named_modules()}
    exporter = planned(whole, 'BF16')
    entries = exporter.entries
    found, _ = find_tokenizer(None, None, exporter, whole)
    assert found is words
    folder = tmp_path / 'found'
    folder.mkdir()
    warnings = exporter.write_hf_assets(folder, found, ())
    assert [module['path'] for module in json.loads((folder / 'modules.json').read_text())][:2] == ['', '1_Pooling']
    assert read_json(folder / '1_Pooling' / 'config.json') == {'pooling_mode': 'cls'}
    assert {'sentence_bert_config.json', 'tokenizer.json'} <= {path.name for path in folder.iterdir()}
    assert list(folder.rglob('*.safetensors')) == []
    around = [one for one in entries if one.file_set.folder]
    if with_weights is Projection:
        assert {one.file_set.path(f'{one.file_set.stem}.safetensors') for one in around} == {f'2_Projection/{WEIGHTS}'}
        told = {one.hf_name: (one.shape, one.dtype, one.reads) for one in around}
        assert told == {'linear.weight': ((4, 4), 'BF16', ('2.weight',)), 'linear.bias': ((4,), 'BF16', ('2.bias',))}
    if with_weights is Halved:  # what it saves is computed, and what it does not save stands under its own name
        assert {one.hf_name: (one.file_set.folder, one.reads) for one in around} == {
            'weight': ('2_Halved', ('2.weight',)),
            '2.bias': ('other_modules', ('2.bias',)),
        }
        weight = torch.ones(4, 4)
        (half,) = [one for one in around if one.hf_name == 'weight']
        assert torch.equal(half.combine({'2.weight': weight})['weight'], weight / 2)
    assert warnings == [] and exporter.left_out == []
    assert {name: dict(vars(module)) for name, module in whole.named_modules()} == before


@pytest.mark.parametrize('lora', [None, 'adapter', 'merge', 'both'])
def test_weights_around_the_exported_model(lora, tmp_path):
    model = build('llama') if lora is None else adapted('llama')
    whole = Sentences(First(model, tokenizer()), Pooling(), Projection(4, 4))
    save_hf(whole, tmp_path / 'found', **({} if lora is None else {'lora': lora}))
    weights = load_file(tmp_path / 'found' / '2_Projection' / 'model.safetensors')
    assert weights.keys() == {'linear.weight', 'linear.bias'}
    assert torch.equal(weights['linear.weight'], whole[2].weight) and torch.equal(weights['linear.bias'], whole[2].bias)
    found = {path.relative_to(tmp_path / 'found').as_posix() for path in (tmp_path / 'found').rglob('*.safetensors')}
    main = {'adapter': {'adapter_model'}, 'both': {'model', 'adapter/adapter_model'}}.get(lora, {'model'})
    assert found == {'2_Projection/model.safetensors', *(f'{name}.safetensors' for name in main)}
    assert (tmp_path / 'found' / 'modules.json').is_file()


@pytest.mark.parametrize('lora', [None, 'adapter', 'merge', 'both'])
def test_what_is_trained_beside_the_exported_model(lora, tmp_path):
    """As Sa2VA: a decoder of masks in a frozen encoder, and projections; with the names of the state dict."""
    encoder = around(vision=torch.nn.Linear(4, 4), decoder=torch.nn.Sequential(torch.nn.Linear(4, 3)))
    encoder.vision.requires_grad_(False)
    normalized = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    llm = build('llama') if lora is None else adapted('llama')
    whole = around(llm=llm, grounding_encoder=encoder, text_hidden_fcs=normalized, critic=build('bert'))
    if lora is None:
        whole.critic.requires_grad_(False)
    options = {} if lora is None else {'lora': lora}
    save_hf(whole, tmp_path / 'found', **options)
    save_hf(around(llm=llm), tmp_path / 'alone', **options)
    assert_same_files(tmp_path / 'found', tmp_path / 'alone', but='other_modules')
    saved = tmp_path / 'found' / 'other_modules'
    assert json.loads((saved / 'config.json').read_text())['exported_model'] == 'llm'
    kept = ('grounding_encoder.decoder.', 'text_hidden_fcs.')  # another model of transformers is left to another hook
    expected = {name: tensor for name, tensor in whole.state_dict().items() if name.startswith(kept)}
    assert 'text_hidden_fcs.1.running_mean' in expected and len(expected) == 9
    found = load_file(saved / 'model.safetensors')
    assert_same_tensors(found, expected)
    assert whole.load_state_dict(found, strict=False).unexpected_keys == []
    assert verify([str(tmp_path / 'found')]) == 0


@pytest.mark.parametrize('kind', ['LlamaForCausalLM', 'LlamaForSequenceClassification'])
def test_what_lies_beside_a_base_of_the_same_class(kind, tmp_path):
    """What plain code trains from a folder of sentence-transformers keeps its pooling; another class does not."""
    base = tmp_path / 'base'
    model = with_base(build('llama'), base, architectures=[kind])
    (base / '1_Pooling').mkdir()
    (base / '1_Pooling' / 'config.json').write_text('{"pooling_mode": "cls"}')
    (base / '2_Dense').mkdir()
    (base / '2_Dense' / 'pytorch_model.bin').write_text('weights of an older version')
    modules = [{'path': path} for path in ('', '1_Pooling', '2_Dense', '../base/1_Pooling')]
    (base / 'modules.json').write_text(json.dumps(modules))
    (base / 'spk_dict.pt').write_text('voices')
    assert written(tmp_path / 'found', model) == []
    names = {'modules.json', 'spk_dict.pt', '1_Pooling/config.json', '2_Dense/pytorch_model.bin'}
    found = {path.relative_to(tmp_path / 'found').as_posix() for path in (tmp_path / 'found').rglob('*')}
    assert names & found == (names if kind == 'LlamaForCausalLM' else set())
    for name in names & found:
        assert (tmp_path / 'found' / name).read_bytes() == (base / name).read_bytes()


def test_tensors_of_the_base_that_the_class_does_not_have(tmp_path):
    """As the layers for multi-token prediction of MiMo and Qwen3-Next, which no field of config.json announces."""
    model = with_whole_base(build('llama'), tmp_path / 'base')
    assert written(tmp_path / 'found', model) == []
    more = {'model.mtp_layers.0.proj.weight': torch.ones(2), 'model.layers.0.self_attn.q_proj.scale': torch.ones(1)}
    edit_tensors(tmp_path / 'base', lambda tensors: {**tensors, **more})
    (warning,) = written(tmp_path / 'found', model)
    assert warning == (
        f"the save lacks 1 tensor of the base model '{tmp_path}/base', for which LlamaForCausalLM of transformers has "
        f"no modules: model.mtp_layers.0.proj.weight; readers that use them need carry_base='all', which copies them"
    )


def relative_position_index(tensors):
    tables = [name for name in tensors if name.endswith('relative_position_bias_table')]
    return {name.replace('_bias_table', '_index'): torch.zeros(16, 16, dtype=torch.long) for name in tables}


#: What files of often used bases have beside the tensors that the class loads: buffers of older versions, what the
#: class lists as ignored, and other heads.
NOT_MISSED = {
    'llama': lambda _: {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(4)},
    't5': lambda _: {'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight': torch.ones(32, 4)},
    'swin': relative_position_index,
    'bert': lambda _: {
        'bert.pooler.dense.weight': torch.ones(40, 40),
        'cls.seq_relationship.bias': torch.ones(2),
        'bert.embeddings.position_ids': torch.arange(64)[None],
    },
}


@pytest.mark.parametrize('family', NOT_MISSED)
def test_tensors_that_no_reader_misses(family, tmp_path):
    model = with_whole_base(build(family), tmp_path / 'base')
    more = NOT_MISSED[family](folder_tensors(tmp_path / 'base'))
    edit_tensors(tmp_path / 'base', lambda tensors: {**tensors, **more})
    assert more and written(tmp_path / 'found', model) == []
    exporter, specs = HuggingFaceExporter(model, None), source_for(model).specs()
    without, export = (exporter.export(ExportRequest(specs, carry_base=option)) for option in (None, 'all'))
    carried = {entry.hf_name for entry in export.entries} - {entry.hf_name for entry in without.entries}
    heads = {'bert.pooler.dense.weight', 'cls.seq_relationship.bias'}
    assert carried == (heads if family == 'bert' else set())


def test_ignored_layers_for_multi_token_prediction_are_copied(tmp_path, monkeypatch):
    """As of DeepSeek-V3, whose class lists them as ignored."""
    model = with_whole_base(build('llama'), tmp_path / 'base')
    layer = f'model.layers.{model.config.num_hidden_layers}.mlp.up_proj.weight'
    monkeypatch.setattr(type(model), '_keys_to_ignore_on_load_unexpected', [layer])
    edit_tensors(tmp_path / 'base', lambda tensors: {**tensors, layer: torch.ones(2)})
    (warning,) = written(tmp_path / 'found', model)
    assert layer in warning
    export = HuggingFaceExporter(model, None).export(ExportRequest(source_for(model).specs(), carry_base='all'))
    assert layer in {entry.hf_name for entry in export.entries}


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
    decoder = {**ODD_ENCODER, 'model_type': 'bert'}
    parts = {'encoder': {**decoder, 'vocab_size': 7}, 'decoder': decoder}
    text = EncoderDecoderModel(small_config('EncoderDecoderModel', parts))
    parts['encoder'] = {'model_type': 'clip_vision_model'}
    image = VisionEncoderDecoderModel(small_config('VisionEncoderDecoderModel', parts))
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


@pytest.fixture
def whisper(tmp_path):
    """A base with a whole processor, and its model."""
    words = ['<|endoftext|>', *'abcdefghijklmnopqrstuvwxyz', 'Ġ']
    (tmp_path / 'words').mkdir()
    (tmp_path / 'words' / 'vocab.json').write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (tmp_path / 'words' / 'merges.txt').write_text('#version: 0.2\n')
    of_text = WhisperTokenizer.from_pretrained(tmp_path / 'words')
    processor = WhisperProcessor(WhisperFeatureExtractor(feature_size=16, chunk_length=1), of_text)
    processor.save_pretrained(tmp_path / 'base')
    config = dict(
        num_mel_bins=16, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=37, decoder_ffn_dim=37
    )
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, max_source_positions=50, max_target_positions=32)
    ids = dict(pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=1)
    model = WhisperForConditionalGeneration(WhisperConfig(vocab_size=len(of_text), **config, **heads, **ids))
    return with_base(model, tmp_path / 'base')


@pytest.mark.parametrize('given', ['processor', 'feature_extractor', 'tokenizer', 'nothing'])
def test_what_the_run_does_not_give_comes_from_the_base(given, whisper, tmp_path):
    """Whisper's tutorial gives Trainer the feature extractor alone."""
    processor = WhisperProcessor.from_pretrained(tmp_path / 'base')
    of_run = {'processor': processor, 'nothing': None}.get(given, getattr(processor, given, None))
    found, warnings = find_tokenizer(None, of_run, HuggingFaceExporter(whisper, None))
    assert warnings == [] and written(tmp_path / 'found', whisper, tokenizer=found) == []
    names = {path.name for path in (tmp_path / 'base').iterdir()} - {'config.json'}
    assert names <= {path.name for path in (tmp_path / 'found').iterdir()}
    for name in names:
        assert (tmp_path / 'found' / name).read_bytes() == (tmp_path / 'base' / name).read_bytes(), name


def test_a_part_of_the_run_takes_the_place_of_the_bases(whisper, tmp_path):
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    found, _ = find_tokenizer(None, extractor, HuggingFaceExporter(whisper, None))
    written(tmp_path / 'found', whisper, tokenizer=found)
    loaded = WhisperProcessor.from_pretrained(tmp_path / 'found')
    assert loaded.feature_extractor.chunk_length == 2 and len(loaded.tokenizer) == whisper.config.vocab_size


@pytest.mark.parametrize('has_tokenizer', [True, False])
def test_an_image_processor_without_a_processor(has_tokenizer, tmp_path):
    """As for vit-gpt2: image processor and tokenizer are beside each other in the base."""
    model = with_base(build('llama'), tmp_path / 'base')
    images = ViTImageProcessor(size=dict(height=8, width=8))
    if has_tokenizer:
        tokenizer(9).save_pretrained(tmp_path / 'base')
    found, warnings = find_tokenizer(None, images, HuggingFaceExporter(model, None))
    written(tmp_path / 'found', model, tokenizer=found)
    assert read_json(tmp_path / 'found' / 'preprocessor_config.json')['size'] == dict(height=8, width=8)
    assert (tmp_path / 'found' / 'tokenizer.json').exists() == has_tokenizer
    told = f"no tokenizer will be saved: that of the run is a {type(images).__name__}, and the base model '"
    assert [warning.startswith(told) for warning in warnings] == ([] if has_tokenizer else [True])


@pytest.mark.parametrize('part', ['loads', 'has code of its own'])
def test_the_option_names_a_folder_with_a_tokenizer_and_a_part(part, tmp_path):
    """Both are saved: the option names this folder."""
    model = build('llama')
    tokenizer(9).save_pretrained(tmp_path / 'named')
    ViTImageProcessor(size=dict(height=8, width=8)).save_pretrained(tmp_path / 'named')
    settings = tmp_path / 'named' / 'preprocessor_config.json'
    if part == 'has code of its own':
        own = dict(image_processor_type='Own', auto_map=dict(AutoImageProcessor='own.Own'))
        (tmp_path / 'named' / 'own.py').write_text('# the code')
        settings.write_text(json.dumps({**read_json(settings), **own}))
    found, warnings = find_tokenizer(str(tmp_path / 'named'), None, HuggingFaceExporter(model, None))
    assert warnings == [] and written(tmp_path / 'found', model, tokenizer=found) == []
    assert read_json(tmp_path / 'found' / settings.name)['size'] == dict(height=8, width=8)
    assert len(AutoTokenizer.from_pretrained(tmp_path / 'found')) == 9
    assert (tmp_path / 'found' / 'own.py').exists() == (part != 'loads')


def test_a_model_without_words_needs_no_tokenizer(tmp_path):
    model = with_base(ViTModel(ViTConfig(**VISION_TOWER)), tmp_path / 'base')
    assert find_tokenizer(None, None, HuggingFaceExporter(model, None)) == (None, [])
    images = ViTImageProcessor()
    assert find_tokenizer(None, images, HuggingFaceExporter(model, None)) == (images, [])


def test_the_vocabulary_of_a_processor_is_compared(whisper, tmp_path):
    processor = WhisperProcessor.from_pretrained(tmp_path / 'base')
    processor.tokenizer.add_tokens(['<new>'])
    rows = whisper.config.vocab_size
    with pytest.raises(ModelError, match=f'has {rows + 1} tokens, but the model has embeddings for {rows}'):
        written(tmp_path / 'found', whisper, tokenizer=processor)


def test_a_folder_with_a_processor_gives_the_processor(whisper, tmp_path):
    given = WhisperProcessor.from_pretrained(tmp_path / 'base')
    given.feature_extractor.chunk_length = 3
    given.save_pretrained(tmp_path / 'given')
    found, warnings = find_tokenizer(tmp_path / 'given', None, HuggingFaceExporter(whisper, None))
    assert warnings == [] and written(tmp_path / 'found', whisper, tokenizer=found) == []
    assert WhisperProcessor.from_pretrained(tmp_path / 'found').feature_extractor.chunk_length == 3


@pytest.mark.parametrize('given', ['nothing', 'folder'])
def test_a_tokenizer_with_code_of_its_own_is_copied_unrun(given, tmp_path):
    base = tmp_path / 'base'
    model = with_base(build('llama'), base)
    tokenizer(9).save_pretrained(base)
    (base / 'tokenization_own.py').write_text("from .words import NAMES\nopen('/ran', 'w')\nFILE = 'own.tiktoken'\n")
    (base / 'words.py').write_text('NAMES = ()\n')
    (base / 'own.tiktoken').write_text('own')
    (base / 'notes.txt').write_text('not named')
    code = {'AutoTokenizer': ['tokenization_own.OwnTokenizer', None]}
    edit_json(base / 'tokenizer_config.json', tokenizer_class='OwnTokenizer', auto_map=code)
    found, warnings = find_tokenizer(base if given == 'folder' else None, None, HuggingFaceExporter(model, None))
    (warning,) = warnings
    assert warning.endswith('is copied as it is: it has code of its own, which is not run')
    assert written(tmp_path / 'found', model, tokenizer=found) == []
    names = {path.name for path in base.iterdir()} - {'config.json', 'notes.txt'}
    assert {path.name for path in (tmp_path / 'found').iterdir()} >= names
    assert not (tmp_path / 'found' / 'notes.txt').exists()
    for name in names:
        assert (tmp_path / 'found' / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.parametrize('name', ['tekken.json', 'spiece.model'])
def test_a_vocabulary_that_cannot_be_loaded_here_is_copied(name, tmp_path):
    model = with_base(build('llama'), tmp_path / 'base')
    (tmp_path / 'base' / name).write_text('{}')
    found, (warning,) = find_tokenizer(None, None, HuggingFaceExporter(model, None))
    assert "base' is copied as it is: it cannot be loaded here: " in warning
    written(tmp_path / 'found', model, tokenizer=found)
    assert (tmp_path / 'found' / name).read_text() == '{}'


@pytest.mark.parametrize('has_code', [True, False])
def test_code_that_the_config_names_comes_from_the_base(has_code, tmp_path):
    """As Phi-3's: transformers has the class by now, and the base still has code for older versions."""
    model = with_base(build('llama'), tmp_path / 'base', auto_map={'AutoModelForCausalLM': 'modeling_own.OwnModel'})
    model.config.auto_map = {'AutoModelForCausalLM': 'modeling_own.OwnModel'}
    if has_code:
        (tmp_path / 'base' / 'modeling_own.py').write_text('class OwnModel: ...\n')
    warnings = written(tmp_path / 'found', model)
    if has_code:
        assert warnings == [] and (tmp_path / 'found' / 'modeling_own.py').read_text() == 'class OwnModel: ...\n'
    else:
        (warning,) = warnings
        assert warning.startswith('auto_map names code that is not in the folder') and 'modeling_own.py' in warning


@pytest.mark.parametrize('revisions', ['differ', 'are alike'])
@pytest.mark.parametrize('is_protected_first', [True, False])
def test_the_revision_of_a_base_in_the_hub_cache(revisions, is_protected_first, tmp_path, monkeypatch):
    """transformers 5 does not tell which one was loaded: never the tokenizer of another one, and a warning."""
    repository = tmp_path / 'hub' / 'models--organization--base'
    (repository / 'refs').mkdir(parents=True)
    for ref, commit, n_tokens in (('main', 'a' * 40, 9), ('v2', 'b' * 40, 9 if revisions == 'are alike' else 11)):
        build('llama').save_pretrained(repository / 'snapshots' / commit)
        tokenizer(n_tokens).save_pretrained(repository / 'snapshots' / commit)
        (repository / 'refs' / ref).write_text(commit)
    use_hub_cache(tmp_path / 'hub', monkeypatch)
    model = AutoModelForCausalLM.from_pretrained('organization/base', revision='v2')
    if is_protected_first:  # as in a run with LoRA, whose exporter asks for its base later
        (protected,) = base_dirs_of(model)
        has_folder = revisions == 'are alike' or getattr(model.config, '_commit_hash', None) is not None
        assert Path(protected).is_dir() if has_folder else protected == 'organization/base'
    found, warnings = find_tokenizer(None, None, HuggingFaceExporter(model, None))
    if revisions == 'are alike':
        assert len(found) == 9 and warnings == []
    elif getattr(model.config, '_commit_hash', None) is not None:
        assert len(found) == 11 and warnings == []
    else:
        assert found is None and warnings[0].startswith('the cache has several revisions of organization/base, ')
        assert 'no tokenizer will be saved' in warnings[1]


@pytest.mark.skipif(converts_weights(), reason='transformers 5 has rope_parameters')
def test_a_scaling_by_one_that_the_class_refuses_is_left_out(tmp_path):
    """XTuner sets it after loading, where max_position_embeddings is not more than the base's."""
    model = build('llama')
    model.config.rope_scaling = {'type': 'linear', 'factor': 1.0}
    assert written(tmp_path, model) == [] and model.config.rope_scaling['factor'] == 1
    assert (AutoConfig.from_pretrained(tmp_path).rope_scaling or {'factor': 1.0})['factor'] == 1


# generation_config.json


@pytest.mark.parametrize('has_file', [True, False])
def test_what_training_forces_is_as_in_the_base(has_file, tmp_path, monkeypatch):
    """Axolotl sets do_sample, and use_cache before it loads the model. Everything else is the user's."""
    monkeypatch.setitem(sys.modules, 'axolotl', ModuleType('axolotl'))
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
    assert found.do_sample is True and found.temperature == 0.5 and found.use_cache is not False


def test_a_users_own_sampling_is_saved(tmp_path):
    """As save_pretrained does. Only Axolotl sets it by itself."""
    model = with_base(build('llama'), tmp_path / 'base')
    for before in (False, True):
        GenerationConfig(do_sample=before).save_pretrained(tmp_path / 'base')
        model.generation_config = GenerationConfig(do_sample=not before, use_cache=False)
        assert written(tmp_path / f'from_{before}', model) == []
        found = GenerationConfig.from_pretrained(tmp_path / f'from_{before}')
        assert bool(found.do_sample) is not before and found.use_cache is not False


def test_sampling_options_without_sampling_are_repaired(tmp_path):
    """The base models of many published fine-tunes have this; save_pretrained raises on it, or writes nothing."""
    model = build('llama')
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.5
    before = model.generation_config.to_dict()
    with suppress(ValueError):
        copy.deepcopy(model.generation_config).save_pretrained(tmp_path / 'refused')
    assert not (tmp_path / 'refused' / 'generation_config.json').exists()
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
        with pytest.raises(ModelError, match='Generation parameters found'):
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
    assert dtype_in(tmp_path) == dtype_in(tmp_path / 'expected') == 'float32'
