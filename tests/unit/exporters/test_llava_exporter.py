"""XTuner's LLaVAModel goes out in XTuner's layout or as LlavaForConditionalGeneration."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel, LlavaConfig, LlavaForConditionalGeneration

from tests.helpers.checks.compare import assert_loads_clean, folder_tensors
from tests.helpers.models.adapted import Planned, around, is_known_to_peft, planned
from tests.helpers.models.remote_code import use_modules_cache
from tests.helpers.models.zoo import build
from tests.helpers.models.zoo.llava import VOCAB_SIZE, TinyLlava, n_image_tokens, question, save_bases, tokenizer
from tests.helpers.runs.engines import save_folder
from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters import HuggingFaceExporter, LoraExporter, exporter_for
from xhf_hooks.options import DTYPE_CODES
from xhf_hooks.xtuner import LlavaExporter

LLM_LORA = {'llm': dict(target_modules='all-linear')}
#: If the installed peft merges it into embeddings.
DORA = {'use_dora': True} if is_known_to_peft('embedding_dora') else {}
BOTH_LORA = {**LLM_LORA, 'visual_encoder': dict(target_modules=['q_proj', 'v_proj'])}


#: transformers before 4.46 has no projector without a bias.
MAY_LACK_BIAS = 'multimodal_projector_bias' in inspect.signature(LlavaConfig).parameters


@pytest.fixture(scope='module')
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp('bases')
    save_bases(root)
    return root


def saved(model: nn.Module, folder: Path, *, words: int | None = VOCAB_SIZE, **options) -> tuple[Path, Planned]:
    """Saves ``model`` with a tokenizer; the folder and the exporter."""
    how = {k: options.get(k) for k in ('lora', 'llava_format')}
    exporter = planned(model, DTYPE_CODES.get(options.get('dtype')), **how)
    _, committed = save_folder(model, folder, **options)
    exporter.write_hf_assets(committed.path, None if words is None else tokenizer(words), ())
    return committed.path, exporter


def folders(path: Path) -> dict[str, list[str]]:
    """Folder to the weights in it."""
    found: dict[str, list[str]] = {}
    for file in sorted(path.rglob('*.safetensors')):
        found.setdefault(str(file.parent.relative_to(path)), []).append(file.name)
    return found


def logits_of(folder: Path) -> torch.Tensor:
    """Of :func:`question`, by what from_pretrained makes of the folder."""
    model = assert_loads_clean(folder, LlavaForConditionalGeneration).eval()
    image, before, after = question()
    ids = torch.cat([before, torch.full((1, n_image_tokens()), model.config.image_token_index), after], dim=1)
    return model(input_ids=ids, pixel_values=image, attention_mask=torch.ones_like(ids)).logits[..., :VOCAB_SIZE]


# XTuner's layout


def test_projector_loads_with_its_own_code(bases, tmp_path, monkeypatch):
    use_modules_cache(tmp_path / 'modules', monkeypatch)
    model = TinyLlava(bases, hidden_act='relu', bias=False, depth=3)
    path, _ = saved(model, tmp_path / 'hf_model')
    loaded = AutoModel.from_pretrained(path / 'projector', trust_remote_code=True)
    x = torch.randn(2, 35)
    assert torch.equal(loaded(x), model.projector(x))


@pytest.mark.parametrize('excluded_by', [None, 'code of its own', 'depth'])
def test_one_model_is_advised_only_where_it_can_be_written(excluded_by, bases):
    """As in pretraining, which freezes all but the projector."""
    model = TinyLlava(bases, frozen=('llm', 'visual_encoder'), depth=3 if excluded_by == 'depth' else 2)
    if excluded_by == 'code of its own':
        model.llm.__class__ = type('InternLM2ForCausalLM', (type(model.llm),), {'__module__': 'modeling_internlm2'})
    (of_llm, _, _) = exporter_for(model, None).notes
    assert of_llm.startswith('llm is frozen and not written: use ')
    assert of_llm.endswith(", or set llava_format to 'huggingface'") == (excluded_by is None)
    if excluded_by is not None:
        with pytest.raises(ModelError, match="set llava_format to 'xtuner'"):
            exporter_for(model, None, llava_format='huggingface')


def test_adapters_beside_merged_parts(bases, tmp_path):
    """XTuner would apply a llm_adapter at the root once more."""
    path, _ = saved(TinyLlava(bases, lora=BOTH_LORA), tmp_path / 'hf_model', lora='both')
    merged = {folder: ['model.safetensors'] for folder in ('.', 'visual_encoder', 'projector')}
    adapters = {f'adapter/{name}_adapter': ['adapter_model.safetensors'] for name in ('llm', 'visual_encoder')}
    assert folders(path) == {**merged, **adapters}


# LlavaForConditionalGeneration


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(), VOCAB_SIZE),
        (dict(visual_select_layer=-1, hidden_act='relu', bias=not MAY_LACK_BIAS), VOCAB_SIZE),
        (dict(lora=BOTH_LORA), VOCAB_SIZE),
        (dict(lora={'llm': dict(target_modules=['embed_tokens', 'lm_head'], **DORA)}), VOCAB_SIZE),
        (dict(), VOCAB_SIZE - 3),
    ],
    ids=['full', 'other_options', 'lora', 'lora_embeddings', 'rows_to_spare'],
)
def test_one_model(options, words, tmp_path):
    save_bases(tmp_path, words)
    model = TinyLlava(tmp_path, **options).eval()
    path, exporter = saved(model, tmp_path / 'hf_model', words=words, llava_format='huggingface')
    assert folders(path) == {'.': ['model.safetensors']}
    torch.testing.assert_close(logits_of(path), model(*question()), rtol=1e-5, atol=1e-5)
    assert exporter.notes == ()
    assert all('lora_' in name or 'original' in name or 'base_layer' in name for name in exporter.left_out)


def test_new_rows_are_the_mean(bases, tmp_path):
    model = TinyLlava(bases)
    path, _ = saved(model, tmp_path / 'hf_model', llava_format='huggingface', dtype='bfloat16')
    tensors = folder_tensors(path)
    for name, live in (
        ('language_model.model.embed_tokens.weight', model.llm.get_input_embeddings().weight),
        ('language_model.lm_head.weight', model.llm.lm_head.weight),
    ):
        rows = torch.cat([live, live.double().mean(dim=0).float().expand(192 - VOCAB_SIZE, -1)])  # a multiple of 64
        assert torch.equal(tensors[name], rows.bfloat16())
    assert json.loads((path / 'config.json').read_text())['text_config']['vocab_size'] == 192
    assert assert_loads_clean(path, LlavaForConditionalGeneration).dtype == torch.bfloat16


def test_tied_embeddings_stay_tied(bases, tmp_path):
    model = TinyLlava(bases, llm=build('llama_tied')).eval()
    path, _ = saved(model, tmp_path / 'hf_model', llava_format='huggingface')
    assert not any('lm_head' in name for name in folder_tensors(path))
    torch.testing.assert_close(logits_of(path), model(*question()), rtol=1e-5, atol=1e-5)


# Which exporter, and what is refused


def test_recognised_by_its_children(bases):
    model = TinyLlava(bases, lora=LLM_LORA)
    assert type(exporter_for(model.to('meta'), None)) is LlavaExporter
    assert type(exporter_for(TinyLlava(bases), 'llm')) is HuggingFaceExporter
    assert type(exporter_for(model, 'llm')) is LoraExporter
    two = around(llm=build('llama'), visual_encoder=build('bert'))
    assert type(exporter_for(two, None)) is HuggingFaceExporter


REFUSED = {
    'adapter_alone': (dict(lora=LLM_LORA), dict(lora='adapter'), "lora: expected None, 'merge' or 'both' with llava_"),
    'three_layers': (dict(depth=3), {}, 'of 2 layers, found depth 3; set llava_format'),
    'many_tokens': ({}, dict(words=200), 'the tokenizer has 202 tokens, but the embeddings have 192 rows'),
}


@pytest.mark.parametrize('kind', REFUSED)
def test_refused(kind, bases, tmp_path):
    trained, options, said = REFUSED[kind]
    with pytest.raises((ModelError, OptionError), match=said):
        saved(TinyLlava(bases, **trained), tmp_path / 'hf_model', llava_format='huggingface', **options)


def test_quantized_llm(bases):
    model = TinyLlava(bases, lora=LLM_LORA)
    model.llm.get_base_model().quantization_method = 'bitsandbytes'
    assert type(exporter_for(model, None)) is LlavaExporter
    with pytest.raises(ModelError, match=r'is quantized \(bitsandbytes\).* set llava_format to None'):
        exporter_for(model, None, llava_format='huggingface')


def test_without_tokenizer_and_preprocessor(bases, tmp_path):
    model = TinyLlava(bases, llm=build('llama'))
    model.visual_encoder.config._name_or_path = ''
    _, committed = save_folder(model, tmp_path / 'hf_model', llava_format='huggingface')
    assert [w.split(':')[0] for w in committed.warnings] == ['no tokenizer', 'no processor was written']
    assert_loads_clean(committed.path, LlavaForConditionalGeneration)
