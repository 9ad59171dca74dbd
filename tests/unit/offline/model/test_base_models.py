"""Runs of every kind of base, whose checkpoint has only what was trained, are converted to what the hook writes."""

import json
import shutil
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.helpers.checks.compare import assert_same_folder_tensors, assert_same_tensors, folder_tensors
from tests.helpers.checks.converted import (
    assert_converted_as_by_the_hook,
    assert_same_files,
    base_of,
    checkpoint_of,
    convert,
    refused,
)
from tests.helpers.models.adapted import adapt
from tests.helpers.models.model_folder import edit_json, resize_embeddings, save_tokenizer
from tests.helpers.models.remote_code import use_hub_cache
from tests.helpers.models.zoo import ODD_ENCODER, available, has_class_for, small_config
from xhf_hooks import save_hf
from xhf_hooks.compat.transformers import text_config
from xhf_hooks.exporters import huggingface, lora
from xhf_hooks.format.loaded_files import PROCESSOR_FILES
from xhf_hooks.offline.model import base_weights

WEIGHTS = 'model.safetensors'


def from_base(folder: str | Path, kind: str | None = None, **options: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)  # transformers 4.57 writes Qwen2-VL's architectures inside
    return getattr(transformers, kind or config.architectures[0]).from_pretrained(folder, torch_dtype='auto', **options)


def test_what_loading_computes_is_computed_and_read_as_bytes_of_its_sources(tmp_path):
    if not available('mixtral'):
        pytest.skip('this transformers has no Mixtral')
    base = base_of('mixtral', tmp_path / 'base')
    model = from_base(base)
    found = base_weights.weights_of_base(type(model), model.config, base).tensors
    state = model.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.whole(False), state[name]), name
        assert tensor.read_nbytes(False) == state[name].nbytes, name


@pytest.fixture
def named_on_the_hub(tmp_path, monkeypatch):
    """The base ``organization/base`` in a local hub cache."""
    repository = tmp_path / 'hub' / 'models--organization--base'
    base_of('llava', repository / 'snapshots' / 'abc')
    (repository / 'refs').mkdir()
    (repository / 'refs' / 'main').write_text('abc')
    use_hub_cache(tmp_path / 'hub', monkeypatch)
    return repository / 'snapshots' / 'abc'


XTUNERS_CONFIG = """model = dict(
    type='xtuner.model.SupervisedFinetune',
    llm=dict(
        type='transformers.LlavaForConditionalGeneration.from_pretrained', pretrained_model_name_or_path={base!r}
    ),
    lora=dict(type='peft.LoraConfig', r=3, lora_alpha=5, target_modules=['q_proj', 'v_proj'], task_type='CAUSAL_LM'),
)"""


@pytest.mark.parametrize('by', ['config.py', 'adapter_config.json', '--base'])
def test_a_base_named_as_on_the_hub(named_on_the_hub, by, tmp_path):
    model = adapt(from_base(named_on_the_hub))
    for base in (str(named_on_the_hub), 'organization/base'):
        run = tmp_path / Path(base).name
        checkpoint = checkpoint_of(model, run, prefix='llm.' if by == 'config.py' else '')
        if by == 'config.py':
            (run / by).write_text(XTUNERS_CONFIG.format(base=base))
        else:
            edit_json(run / 'adapter_config.json', base_model_name_or_path=base if by != '--base' else 'gone')
        given = ['--base', base] if by == '--base' else []
        convert(checkpoint, run / 'out', '--lora', 'both', *given)
    by_path, by_name = tmp_path / 'abc' / 'out', tmp_path / 'base' / 'out'
    for part in ('', 'adapter'):
        assert_same_folder_tensors(by_name / part, by_path / part)
    if by == 'adapter_config.json':
        written = json.loads((by_name / 'adapter' / by).read_text())
        assert written['base_model_name_or_path'] == 'organization/base', 'not the path on this machine'


def test_a_base_that_is_not_in_the_hub_cache(named_on_the_hub, tmp_path, capsys):
    checkpoint = checkpoint_of(from_base(named_on_the_hub), tmp_path / 'run', whole=True)
    said = refused(capsys, checkpoint, tmp_path / 'out', '--base', 'organization/other')
    assert 'is not in the hub cache, and nothing is downloaded: hf download organization/other, or give a fol' in said


@pytest.mark.modern_only
@pytest.mark.skipif(
    not {'chat_template', 'patch_size'} <= signature(transformers.LlavaProcessor).parameters.keys(),
    reason='this processor has no template, or cannot make room for the patches of an image',
)
def test_a_processor_beside_a_checkpoint_comes_before_the_bases(tmp_path):
    """Trainer puts it beside the config: with its own image size, tokens and chat template."""
    base, run = base_of('llava', tmp_path / 'base'), tmp_path / 'run'
    save_tokenizer(base, 131)
    images = transformers.CLIPImageProcessor(size={'shortest_edge': 8}, crop_size={'height': 8, 'width': 8})
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    transformers.LlavaProcessor(images, tokenizer, patch_size=4, chat_template=template).save_pretrained(base)
    model, processor = from_base(base), transformers.AutoProcessor.from_pretrained(base)
    processor.tokenizer.add_tokens(['<call>'])
    model.resize_token_embeddings(len(processor.tokenizer))
    processor.chat_template = f'<call>{template}'
    processor.image_processor.size = {'shortest_edge': 16}
    checkpoint = checkpoint_of(model, run, whole=True)
    for beside in (model.config, model.generation_config, processor):
        beside.save_pretrained(run)
    (run / 'trainer_state.json').write_text('{}')
    save_hf(model, tmp_path / 'hook', tokenizer=processor)
    found = convert(checkpoint, tmp_path / 'out', '--base', base)
    assert_same_files(found, tmp_path / 'hook')
    settings = [path.read_text() for name in PROCESSOR_FILES if (path := found / name).is_file()]
    assert '"shortest_edge": 16' in ''.join(settings)


@pytest.mark.parametrize(
    ('kind', 'labels', 'lora'),
    [
        ('AutoModelForSequenceClassification', 5, dict(task_type='SEQ_CLS')),
        *[('AutoModelForTokenClassification', 5, dict(task_type='TOKEN_CLS'))]
        * has_class_for('llama', 'TokenClassification'),
        ('AutoModelForSequenceClassification', 2, dict(task_type=None, modules_to_save=['score'])),
    ],
)
def test_classifiers(kind, labels, lora, tmp_path):
    """The class is that of the adapter's task or auto_mapping, with as many labels as were trained."""
    model = adapt(from_base(base_of('llama', tmp_path / 'base'), kind, num_labels=labels), **lora)
    checkpoint = checkpoint_of(model, tmp_path / 'run')
    for mode in ('adapter', 'merge'):
        save_hf(model, tmp_path / f'hook_{mode}', lora=mode)
        if mode == 'adapter':  # with an auto_mapping, if it has no task
            shutil.copy(tmp_path / 'hook_adapter' / 'adapter_config.json', checkpoint.parent)
        assert_same_files(convert(checkpoint, tmp_path / mode, '--lora', mode), tmp_path / f'hook_{mode}')


@pytest.mark.parametrize('tied', [False, True])
def test_trained_embeddings_of_a_larger_vocabulary(tied, tmp_path):
    model = from_base(base_of('llama_tied' if tied else 'llama', tmp_path / 'base'))
    resize_embeddings(model, model.config.vocab_size + 3)
    model = adapt(model, modules_to_save=['embed_tokens', 'lm_head'])
    whole = checkpoint_of(model, tmp_path / 'run', whole=True)
    assert_converted_as_by_the_hook(whole, model, tmp_path, 'adapter', 'merge')
    checkpoint = checkpoint_of(model, tmp_path / 'trained')  # without the frozen copies of what was trained
    assert_same_files(convert(checkpoint, tmp_path / 'out', '--lora', 'merge'), tmp_path / 'hook_merge')
    found = folder_tensors(convert(checkpoint, tmp_path / 'out_adapter', '--lora', 'adapter'))
    expected = folder_tensors(tmp_path / 'hook_adapter')
    assert_same_tensors(found, {name: t for name, t in expected.items() if '.original_module.' not in name})


@pytest.mark.parametrize('family', ['bart', 'pegasus', 'bert', 't5', 'llava', 'marian'])
def test_all_that_has_a_row_per_token_grows_with_the_vocabulary(family, tmp_path):
    """Such as final_logits_bias, and Marian's second size of the vocabulary."""
    if family == 'marian':
        transformers.MarianMTModel(small_config('MarianMTModel', {})).save_pretrained(tmp_path / 'base')
    else:
        base_of(family, tmp_path / 'base')
    model = from_base(tmp_path / 'base')
    model.resize_token_embeddings(text_config(model.config).vocab_size + 3)
    save_hf(model, tmp_path / 'hook')
    checkpoint = checkpoint_of(model, tmp_path / 'run', whole=True)
    assert_same_files(convert(checkpoint, tmp_path / 'out', '--base', tmp_path / 'base'), tmp_path / 'hook')


@pytest.mark.modern_only
@pytest.mark.parametrize('part', [part for part in ('vision', 'text') if f'clip_{part}_model' in CONFIG_MAPPING])
def test_a_part_of_clip_keeps_the_names_of_its_base(part, tmp_path):
    """transformers 4 wrote them with another prefix, which transformers 5 reads, and writes again."""
    kind = transformers.CLIPVisionModel if part == 'vision' else transformers.CLIPTextModel
    kind(small_config(kind.__name__, {} if part == 'vision' else ODD_ENCODER)).save_pretrained(tmp_path / 'base')
    older = {
        name if name.startswith(f'{part}_model.') else f'{part}_model.{name}': tensor
        for name, tensor in load_file(tmp_path / 'base' / WEIGHTS).items()
    }
    save_file(older, tmp_path / 'base' / WEIGHTS, {'format': 'pt'})
    model = kind.from_pretrained(tmp_path / 'base')
    save_hf(model, tmp_path / 'hook')
    checkpoint = checkpoint_of(model, tmp_path / 'run', whole=True)
    found = convert(checkpoint, tmp_path / 'out', '--base', tmp_path / 'base')
    assert folder_tensors(found).keys() == older.keys()
    assert_same_files(found, tmp_path / 'hook')


@pytest.mark.parametrize('path', ['', '_forward_module.'])
def test_a_small_module_beside_the_model_is_saved_beside_it(path, tmp_path, capsys):
    """At the top, and below a wrapper, as Lightning has it."""
    model = from_base(base_of('llama', tmp_path / 'base'))
    state = {f'{path}model.{name}': tensor for name, tensor in model.state_dict().items()}
    torch.save({**state, f'{path}temperature.weight': torch.ones(1)}, tmp_path / 'iter_2.pth')
    save_hf(model, tmp_path / 'hook')
    found = convert(tmp_path / 'iter_2.pth', tmp_path / 'out', '--base', tmp_path / 'base')
    assert_same_files(found, tmp_path / 'hook', but='other_modules')
    beside = load_file(found / 'other_modules' / 'model.safetensors')
    assert beside.keys() == {f'{path}temperature.weight'} and all(
        tensor.equal(torch.ones(1)) for tensor in beside.values()
    )
    assert f'other modules is written: 1 tensor ({path}temperature.weight)' in capsys.readouterr().err


def test_what_would_not_load_is_an_error_before_anything_is_written(tmp_path, capsys, monkeypatch):
    """For each kind of output, with names."""
    checkpoint = checkpoint_of(adapt(from_base(base_of('llama', tmp_path / 'base'))), tmp_path / 'run')

    def without_the_first(load: Any) -> Any:
        return lambda kind, config, tensors, **options: load(kind, config, all_but_first(tensors), **options)

    def all_but_first(tensors: Any) -> Any:
        return dict([*tensors.items()][1:]) if isinstance(tensors, dict) else tensors[1:]

    monkeypatch.setattr(huggingface, 'ask_load', without_the_first(huggingface.ask_load))
    monkeypatch.setattr(lora, 'load_empty_adapter', without_the_first(lora.load_empty_adapter))
    for mode, name in (('adapter', 'q_proj.lora_'), ('merge', 'lm_head.weight'), ('both', 'lm_head.weight')):
        said = refused(capsys, checkpoint, tmp_path / mode, '--lora', mode)
        assert 'would not load' in said and '1 missing' in said and name in said


@pytest.mark.parametrize('family', [one for one in ('llama', 'llama_tied', 'qwen2_vl') if available(one)])
def test_a_base_of_bin_files_lends_as_one_of_safetensors(family, tmp_path):
    base = base_of(family, tmp_path / 'base')
    checkpoint = checkpoint_of(adapt(from_base(base)), tmp_path / 'run')
    expected = convert(checkpoint, tmp_path / 'expected', '--lora', 'merge')
    torch.save(load_file(base / WEIGHTS), base / 'pytorch_model.bin')
    (base / WEIGHTS).unlink()
    assert_same_files(convert(checkpoint, tmp_path / 'out', '--lora', 'merge'), expected)


def test_the_names_in_its_files_are_taken_of_a_base_that_transformers_cannot_load(tmp_path, capsys, monkeypatch):
    def fail(*args: Any, **options: Any) -> None:
        raise ImportError('accelerate is missing')

    checkpoint = checkpoint_of(adapt(from_base(base_of('llama', tmp_path / 'base'))), tmp_path / 'run')
    expected = convert(checkpoint, tmp_path / 'expected', '--lora', 'merge')
    monkeypatch.setattr(base_weights, 'ask_load', fail)
    assert_same_files(convert(checkpoint, tmp_path / 'out', '--lora', 'merge'), expected)
    assert 'the names in files are used (ImportError: accelerate is missing)' in capsys.readouterr().err
