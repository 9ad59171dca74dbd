"""Folders that transformers 5 saves, read by transformers 4: the same token ids and logits, nothing missing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoProcessor

from tests.helpers.checks.reader import read_processor, read_tokenizer
from tests.helpers.models.zoo import MODELS as ZOO
from tests.helpers.models.zoo import small_config
from tests.helpers.runs.older_transformers import run_with_transformers
from xhf_hooks import save_hf
from xhf_hooks.exporters import HuggingFaceExporter
from xhf_hooks.exporters.assets.base_files import LocatedBase
from xhf_hooks.exporters.assets.load_tokenizer import load_tokenizer
from xhf_hooks.exporters.assets.write_tokenizer import write_tokenizer
from xhf_hooks.exporters.base import ExportRequest
from xhf_hooks.sources import source_for

pytestmark = pytest.mark.needs('transformers 4')

READERS = ('4.57.6', '4.48.0')
LLAMA_3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
EXTRA = ('extra_special_tokens', 'additional_special_tokens')
#: Base tokenizer, family, RoPE.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    'llama_3': ('llama_3', 'llama', {**LLAMA_3, 'original_max_position_embeddings': 16}),
    'qwen2': ('qwen2', 'qwen2', {}),
    'llama_2': ('llama_2', 'llama', {'rope_type': 'linear', 'factor': 2.0}),
    'llava': ('llama_2', 'llava', {'rope_type': 'linear', 'factor': 2.0}),
}
CASES = [f'{model}-{kind}' for model in MODELS for kind in ('same', 'changed', 'scratch')]


def changed(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({'pad_token': '<pad>'})
    tokenizer.add_tokens(['<new1>'], special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}new {{ m['content'] }}{% endfor %}"
    return tokenizer


def build(family: str, rope: dict[str, Any], base: Path) -> Any:
    model_class, exceptions = ZOO[family]
    kind = getattr(transformers, model_class)
    if base.exists():  # as transformers 4 saved it; then its names are kept
        model = kind.from_pretrained(base)
    else:
        model = kind(small_config(model_class, {**exceptions, 'vocab_size': 340}))
    text = model.config.get_text_config()
    text.rope_parameters = {**text.rope_parameters, 'rope_theta': 5e5, **rope}
    text.standardize_rope_params()
    torch.manual_seed(0)
    state = {name: tensor + 0.2 * torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}
    built = type(model)(model.config)  # with that RoPE
    built.load_state_dict(state)
    if hasattr(model, '_weight_conversions'):
        built._weight_conversions = model._weight_conversions
    return built.eval()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """Folders by case, with the tokenizer and the logits of the model that was saved; and the folders of the bases."""
    root = tmp_path_factory.mktemp('older_readers')
    run_with_transformers('4.57.6', 'models/older_bases.py', root / 'bases')
    expected = {}
    for name, (base, family, rope) in MODELS.items():
        at = root / 'bases' / f'{name}_base'
        model = build(family, rope, at)
        with torch.no_grad():
            logits = model(input_ids=torch.arange(3, 43)[None]).logits
        shutil.copytree(root / 'bases' / base, at, dirs_exist_ok=True)
        model.config.save_pretrained(at)
        for kind in ('same', 'changed', 'scratch'):
            folder = root / f'{name}-{kind}'
            tokenizer = load_tokenizer(LocatedBase.locate(str(at)), trust_remote_code=False)
            tokenizer = tokenizer if kind == 'same' else changed(tokenizer)
            model.config._name_or_path = '' if kind == 'scratch' else str(at)
            if kind == 'scratch':
                tokenizer.name_or_path = ''
            model.save_pretrained(folder)
            exporter = HuggingFaceExporter(model, None)
            export = exporter.export(ExportRequest(source_for(model).specs()))
            assert [*export.warnings, *exporter.write_hf_assets(export, folder, tokenizer, ())] == []
            expected[folder.name] = (folder, at, tokenizer, logits)
    return expected


@pytest.fixture(scope='module')
def processors(saved, tmp_path_factory):
    """Processors that were saved: as loaded, and with a changed tokenizer or image processor; and their base."""
    base, root = saved['llava-same'][1].with_name('processor'), tmp_path_factory.mktemp('processors')
    made = {}
    for kind in ('same', 'changed', 'images'):
        processor = AutoProcessor.from_pretrained(base)
        if kind == 'changed':
            changed(processor.tokenizer)
        if kind == 'images':
            processor.image_processor.image_mean = [0.9, 0.8, 0.7]
        for _ in range(2):  # the second time from memory
            (root / kind).mkdir(exist_ok=True)
            assert write_tokenizer(root / kind, processor, LocatedBase()) == []
        made[kind] = processor
    return base, root, made


@pytest.fixture(scope='module')
def read(saved, processors, tmp_path_factory):
    """What each version of transformers reads of all of them, in one process each."""
    out, found = tmp_path_factory.mktemp('read'), {}
    _, root, made = processors
    for version in READERS:
        folders = [saved[case][0] for case in CASES] + [root / kind for kind in made]
        run_with_transformers(version, 'checks/reader.py', out / version, *folders)
        found[version] = torch.load(out / version, weights_only=False)
    return found


@pytest.mark.parametrize('version', READERS)
@pytest.mark.parametrize('case', CASES)
def test_read_by_transformers_4(saved, read, case, version):
    folder, _, tokenizer, logits = saved[case]
    found = read[version][str(folder)]
    assert found['version'] == version and found['missing'] == {}
    assert found['tokenizer'] == read_tokenizer(tokenizer)
    torch.testing.assert_close(found['logits'], logits)


@pytest.mark.parametrize('model', MODELS)
def test_an_unchanged_tokenizer_is_the_bases_files(saved, model):
    folder, base, _, _ = saved[f'{model}-same']
    of_model = {'config.json', 'generation_config.json', 'model.safetensors'}
    names = {path.name for path in base.iterdir()} - of_model
    assert {path.name for path in folder.iterdir()} == names | of_model
    assert all((folder / name).read_bytes() == (base / name).read_bytes() for name in names)


@pytest.mark.parametrize('model', MODELS)
def test_a_changed_tokenizer_is_in_the_bases_words(saved, model):
    folder, base, _, _ = saved[f'{model}-changed']
    found, before = (json.loads((at / 'tokenizer_config.json').read_text()) for at in (folder, base))
    differing = {name for name in found.keys() | before.keys() if found.get(name) != before.get(name)}
    assert differing - set(EXTRA) == {'added_tokens_decoder', 'chat_template', 'pad_token'}
    assert not isinstance(found.get(EXTRA[0]), list)
    assert (folder / 'chat_template.jinja').read_text() == found['chat_template']
    assert (folder / 'tokenizer.model').exists() == (base / 'tokenizer.model').exists()


def equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    pixels = torch.allclose(found['pixels'], expected['pixels'], atol=0.02)  # resized by PIL or by torch
    return pixels and all(found[name] == expected[name] for name in ('ids', 'patch_size', 'chat'))


@pytest.mark.parametrize('version', READERS)
def test_processors_are_read_by_transformers_4(processors, read, version):
    _, root, made = processors
    for kind, processor in made.items():
        assert equal(read[version][str(root / kind)], read_processor(processor)), kind


def test_a_changed_image_processor_is_in_the_files_of_the_base(processors):
    """transformers 5 writes it into processor_config.json alone; 4 reads preprocessor_config.json."""
    base, root, _ = processors
    found, before = (json.loads((at / 'preprocessor_config.json').read_text()) for at in (root / 'images', base))
    assert found == {**before, 'image_mean': [0.9, 0.8, 0.7]}
    assert list(AutoProcessor.from_pretrained(root / 'images').image_processor.image_mean) == [0.9, 0.8, 0.7]


def test_an_unchanged_processor_is_the_bases_files(processors):
    base, root, _ = processors
    assert {path.name for path in (root / 'same').iterdir()} == {path.name for path in base.iterdir()}
    assert all((root / 'same' / path.name).read_bytes() == path.read_bytes() for path in base.iterdir())


def test_a_link_out_of_the_base_is_not_followed(saved, tmp_path):
    _, base, _, _ = saved['qwen2-same']
    secret, linked = tmp_path / 'secret', tmp_path / 'base'
    secret.write_text('secret')
    shutil.copytree(base, linked)
    (linked / 'vocab.txt').symlink_to(secret)
    (linked / 'special_tokens_map.json').unlink()
    (linked / 'special_tokens_map.json').symlink_to(Path('tokenizer_config.json'))  # its own
    (tmp_path / 'out').mkdir()
    assert (
        write_tokenizer(
            tmp_path / 'out', load_tokenizer(LocatedBase.locate(str(linked)), trust_remote_code=False), LocatedBase()
        )
        == []
    )
    assert not (tmp_path / 'out' / 'vocab.txt').exists()
    assert (tmp_path / 'out' / 'special_tokens_map.json').read_bytes() == (base / 'tokenizer_config.json').read_bytes()


def test_fields_of_the_base_that_transformers_5_renames(tmp_path):
    """The families' configs as 4.57 writes them: it reads the same of a save of 5, and all weights."""
    run_with_transformers('4.57.6', 'models/older_families.py', Path('make'), tmp_path)
    for folder in sorted(tmp_path.iterdir()):
        architecture = json.loads((folder / 'base' / 'config.json').read_text())['architectures'][0]
        model = getattr(transformers, architecture).from_pretrained(folder / 'base')
        save_hf(model, folder / 'save')
        if folder.name in ('qwen3_moe', 'granitemoehybrid'):  # vision-language models have other names then
            built = type(model)(type(model.config)(**{**model.config.to_dict(), '_name_or_path': ''}))
            built.load_state_dict(model.state_dict())
            save_hf(built, folder / 'built')
    run_with_transformers('4.57.6', 'models/older_families.py', Path('read'), tmp_path)
    assert len(list(tmp_path.iterdir())) == 5
