"""README.md: what the Hub reads in it, that its command loads the model, and when none is written."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub import ModelCard

from tests.helpers.checks.converted import base_of, checkpoint_of, convert
from tests.helpers.models.adapted import adapted
from tests.helpers.models.model_folder import save_model
from tests.helpers.models.zoo import build
from xhf_hooks import save_hf
from xhf_hooks.exporters.assets.base_files import LocatedBase
from xhf_hooks.exporters.model_card import write_model_card
from xhf_hooks.files.manifest import read_manifest
from xhf_hooks.planning.types import Step

STEP = Step('iter', 1500, 1500)


def card_of(folder: Path) -> ModelCard:
    return ModelCard.load(folder / 'README.md')


def fields_of(folder: Path) -> dict[str, Any]:
    """What the Hub reads."""
    return card_of(folder).data.to_dict()


def command_in(folder: Path) -> str:
    return re.search(r'```python\n(.*?)```', card_of(folder).text, re.DOTALL)[1]


def folder_with(folder: Path, config: dict[str, Any], *files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / 'config.json').write_text(json.dumps(config))
    for name in files:
        (folder / name).write_text('{}')
    return folder


@pytest.mark.parametrize(
    ('family', 'task'),
    [
        ('llama', 'text-generation'),
        ('llama_classifier', 'text-classification'),
        ('llama_base', 'feature-extraction'),
        ('bert', 'fill-mask'),
        ('t5', 'text-generation'),
        ('llava', 'image-text-to-text'),
    ],
)
def test_the_command_loads_the_model(tmp_path, monkeypatch, family, task):
    model = build(family)
    committed = save_hf(model, tmp_path / 'hf_model', step=1500)
    expected = {'library_name': 'transformers', 'pipeline_tag': task, 'tags': ['xhf_hooks']}
    # transformers before 4.46 has no such class: the card names the model's own, and no task
    has_auto_class = family != 'llava' or hasattr(transformers, 'AutoModelForImageTextToText')
    if not has_auto_class:
        del expected['pipeline_tag']
    assert fields_of(committed.path) == expected
    monkeypatch.chdir(committed.path)
    names: dict[str, Any] = {}
    exec(command_in(committed.path), names)
    assert type(names['model']) is type(model) and ('Auto' in command_in(committed.path)) == has_auto_class
    assert 'README.md' in read_manifest(committed.path).files


def test_the_step_and_the_tokenizer_are_told_and_no_path_of_the_machine(tmp_path, monkeypatch):
    base = save_model('llama', tmp_path / 'private' / 'my-base')
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    committed = save_hf(model, tmp_path / 'hf_model', step=1500, max_keep_ckpts=2)
    text = card_of(committed.path).text
    assert '\nSaved by xhf_hooks after iteration 1,500 of training.' in text
    assert str(base) not in text and 'base_model' not in fields_of(committed.path)
    monkeypatch.chdir(committed.path)
    names: dict[str, Any] = {}
    exec(command_in(committed.path), names)
    assert len(names['tokenizer']) == model.config.vocab_size


@pytest.mark.parametrize('is_named', [True, False])
def test_the_name_on_the_hub_of_a_base_in_its_cache(tmp_path, is_named):
    """Whether the model was loaded by that name or from the folder of the revision."""
    cached = tmp_path / 'models--owner--a-base' / 'snapshots' / 'abc'
    base = LocatedBase('owner/a-base' if is_named else str(cached), cached, is_path=not is_named)
    folder = folder_with(tmp_path / 'out', {'architectures': ['LlamaForCausalLM']})
    write_model_card(folder, base, Step('epoch', 2, 32))
    assert fields_of(folder)['base_model'] == 'owner/a-base'
    assert '[owner/a-base](https://huggingface.co/owner/a-base)' in card_of(folder).text
    assert 'after epoch 2, iteration 32 of training' in card_of(folder).text


@pytest.mark.parametrize('parent', ['experiment', 'models'])
def test_a_folder_of_snapshots_that_is_no_hub_cache(tmp_path, parent):
    """As experiments of one's own are called, too."""
    base = tmp_path / parent / 'snapshots' / 'epoch_3'
    folder = folder_with(tmp_path / 'out', {'architectures': ['LlamaForCausalLM']})
    write_model_card(folder, LocatedBase(str(base), base, is_path=True), STEP)
    assert 'base_model' not in fields_of(folder) and parent not in card_of(folder).text


@pytest.mark.parametrize(
    ('name', 'expected'),
    [('owner/name', 'owner/name'), ('base', None), ('/gone/base', None), ('a/b/c', None), ('', None)],
)
def test_a_base_that_is_not_on_this_machine(tmp_path, name, expected):
    folder = folder_with(tmp_path / 'out', {'architectures': ['LlamaForCausalLM']})
    write_model_card(folder, LocatedBase.locate(name), STEP)
    assert fields_of(folder).get('base_model') == expected


@pytest.mark.parametrize(
    ('config', 'files', 'library', 'command'),
    [
        (
            {'architectures': ['Mine'], 'auto_map': {'AutoConfig': 'a.B', 'AutoModelForCausalLM': 'own--code.Mine'}},
            ['tokenizer.json', 'processor_config.json'],
            'transformers',
            "from transformers import AutoModelForCausalLM, AutoProcessor\n\nfolder = '.'  # this folder, or its name "
            'on the Hub\nmodel = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)\n'
            'processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)\n',
        ),
        (
            {'architectures': ['BertModel']},
            ['modules.json', 'tokenizer.json'],
            'sentence-transformers',
            "from sentence_transformers import SentenceTransformer\n\nfolder = '.'  # this folder, or its name on the "
            'Hub\nmodel = SentenceTransformer(folder)\n',
        ),
        (
            {'architectures': ['UnknownToTransformers']},
            [],
            'transformers',
            "from transformers import UnknownToTransformers\n\nfolder = '.'  # this folder, or its name on the Hub\n"
            'model = UnknownToTransformers.from_pretrained(folder)\n',
        ),
    ],
)
def test_the_library_and_the_class_are_those_of_the_folder(tmp_path, config, files, library, command):
    folder = folder_with(tmp_path / 'out', config, *files)
    write_model_card(folder, LocatedBase(), STEP)
    assert fields_of(folder)['library_name'] == library and command_in(folder) == command


def test_none_is_written_where_there_is_one_or_none_is_wanted_or_no_library_loads_the_folder(tmp_path):
    folder = folder_with(tmp_path / 'out', {'architectures': ['LlamaForCausalLM']})
    (folder / 'README.md').write_text('mine')
    (tmp_path / 'empty').mkdir()
    of_no_class = folder_with(tmp_path / 'of_no_class', {'model_type': 'world_model'})
    for each in (folder, tmp_path / 'empty', of_no_class):
        write_model_card(each, LocatedBase(), STEP)
    assert (folder / 'README.md').read_text() == 'mine' and not (tmp_path / 'empty' / 'README.md').exists()
    assert not (of_no_class / 'README.md').exists()
    in_a_part = {'model_type': 'qwen2_vl', 'text_config': {'architectures': ['Qwen2VLForConditionalGeneration']}}
    write_model_card(folder_with(tmp_path / 'in_a_part', in_a_part), LocatedBase(), STEP)  # of transformers 4.57
    assert '# Qwen2VLForConditionalGeneration' in (tmp_path / 'in_a_part' / 'README.md').read_text()
    committed = save_hf(build('llama'), tmp_path / 'hf_model', model_card=False)
    assert not (committed.path / 'README.md').exists()


def test_an_adapter_has_that_of_peft_and_a_merged_model_ours(tmp_path):
    committed = save_hf(adapted('llama'), tmp_path / 'hf_model', lora='both')
    assert fields_of(committed.path / 'adapter')['library_name'] == 'peft'
    assert fields_of(committed.path)['library_name'] == 'transformers'


@pytest.mark.parametrize('lora', ['adapter', 'both'])
@pytest.mark.parametrize(
    ('loaded_from', 'expected'),
    [
        ('private/my-base', None),
        ('hub/models--owner--a-base/snapshots/abc', 'owner/a-base'),
        ('owner/not-on-this-machine', 'owner/not-on-this-machine'),
    ],
)
def test_the_card_of_an_adapter_names_its_base_as_ours_does(tmp_path, monkeypatch, loaded_from, expected, lora):
    """peft's has what the model was loaded from, which may be a path: the Hub refuses that."""
    monkeypatch.chdir(tmp_path)
    model = adapted('llama')
    if 'not-on' not in loaded_from:
        loaded_from = str(save_model('llama', tmp_path / loaded_from))
    model.get_base_model().config._name_or_path = model.get_base_model().name_or_path = loaded_from
    model.peft_config['default'].base_model_name_or_path = loaded_from
    model.create_or_update_model_card(str(tmp_path))
    theirs = fields_of(tmp_path)
    assert theirs.pop('base_model') == loaded_from
    committed = save_hf(model, tmp_path / 'hf_model', lora=lora)
    path = committed.path / 'adapter' if lora == 'both' else committed.path
    found = fields_of(path)
    assert found.pop('base_model', None) == expected
    theirs_tags = theirs.pop('tags', [])  # peft 0.13 writes none
    tags = [tag.replace(loaded_from, expected) if expected else tag for tag in theirs_tags]
    assert found.pop('tags', []) == [tag for tag in tags if expected or not tag.startswith('base_model:')]
    assert found == theirs and str(tmp_path) not in (path / 'README.md').read_text()


def test_the_converter_writes_the_same(tmp_path):
    """With the step of the checkpoint; or none."""
    base = base_of('llama', tmp_path / 'base')
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    checkpoint = checkpoint_of(model, tmp_path / 'run', whole=True)
    of_hook = save_hf(model, tmp_path / 'hf_model', step=2).path / 'README.md'
    converted = convert(checkpoint, tmp_path / 'converted', '--base', base)
    assert (converted / 'README.md').read_bytes() == of_hook.read_bytes()
    assert b'after iteration 2 of training' in of_hook.read_bytes()
    without = convert(checkpoint, tmp_path / 'without', '--base', base, '--no-model-card')
    assert not (without / 'README.md').exists()
