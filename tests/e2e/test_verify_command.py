"""The command xhf-verify: exit status, what it prints where, and loading."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.helpers.models.families import MODELS
from tests.helpers.models.model_folder import edit_json, flip, save_model, write_manifest
from tests.helpers.models.zoo import build
from xhf_hooks import save_hf
from xhf_hooks.cli.verify import DIFFERENT, SAME, UNUSABLE, main

WEIGHTS = 'model.safetensors'


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return write_manifest(save_model('llama', tmp_path_factory.mktemp('model') / 'model'))


@pytest.fixture
def copy(model, tmp_path):
    return Path(shutil.copytree(model, tmp_path / 'copy'))


def run(*args: object) -> int:
    return main([str(arg) for arg in args])


def test_one_folder(copy, capsys):
    assert run(copy) == SAME
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].startswith(f'{copy}: good (') and 'GB/s' in said.out
    assert 'unchecked' not in said.out and said.err == ''
    assert 'LlamaForCausalLM, 21 F32, iter 7, live weights, deepspeed ZeRO-3, 2 ranks' in said.out
    flip(copy / WEIGHTS, -1)
    assert run(copy) == DIFFERENT
    said = capsys.readouterr().out
    assert 'problem    checksums' in said and 'DAMAGED OR CHANGED' in said.splitlines()[-1]
    assert run(copy, '--no-read') == SAME
    assert 'nothing was read' in capsys.readouterr().out


@pytest.mark.parametrize('paths', [['.'], ['none', 'model'], ['model', 'none']])
def test_unusable(model, tmp_path, paths, capsys):
    named = {'none': tmp_path / 'none', '.': tmp_path, 'model': model}
    assert run(*(named[path] for path in paths)) == UNUSABLE
    said = capsys.readouterr()
    assert said.out == '' and len(said.err.splitlines()) == 1 and said.err.startswith('xhf-verify: ')


def test_the_same_rounded_and_different(model, copy, capsys):
    assert run(model, copy) == SAME
    assert capsys.readouterr().out.splitlines()[-1].startswith('identical: 21 identical, 0 rounding, 0 different (')
    tensors = load_file(copy / WEIGHTS)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, copy / WEIGHTS)
    assert run(model, copy) == SAME
    said = capsys.readouterr().out
    assert 'the same but for rounding: 0 identical, 21 rounding' in said and 'rounded to BF16' in said
    tensors['lm_head.weight'][3, 3] += 1
    save_file(tensors, copy / WEIGHTS)
    assert run(model, copy) == DIFFERENT
    said = capsys.readouterr().out
    assert 'different' in said.splitlines()[3] and 'lm_head.weight' in said.splitlines()[3]
    assert run(model, copy, '--json') == DIFFERENT
    content = json.loads(capsys.readouterr().out)
    assert content['verdict'] == 'different' and content['tensors'][0]['max_abs'] == 1.0


def test_load(model, copy, capsys):
    assert run(model, '--load', '--json') == SAME
    found = {one['check']: one['text'] for one in json.loads(capsys.readouterr().out)['findings']}
    assert found['load'].startswith('LlamaForCausalLM in') and 'w' in found['generation']
    (copy / 'xhf_manifest.json').unlink()
    tensors = load_file(copy / WEIGHTS)
    tensors['lm_head.weight'].fill_(3e38)
    save_file(tensors, copy / WEIGHTS, {'format': 'pt'})
    assert run(copy, '--load') == DIFFERENT
    assert 'problem    run' in capsys.readouterr().out


def test_load_tells_what_the_model_misses(copy, capsys):
    """What transformers would only warn about."""
    (copy / 'xhf_manifest.json').unlink()
    tensors = load_file(copy / WEIGHTS)
    tensors['model.norm2.weight'] = tensors.pop('model.norm.weight')
    tensors['lm_head.weight'] = tensors['lm_head.weight'][:-1].contiguous()
    save_file(tensors, copy / WEIGHTS, {'format': 'pt'})
    assert run(copy) == SAME
    capsys.readouterr()
    assert run(copy, '--load') == DIFFERENT
    said = capsys.readouterr().out
    for words in ('missing: model.norm.weight', 'unexpected: model.norm2.weight', 'of other shape: lm_head.weight'):
        assert f'LlamaForCausalLM: 1 {words}' in said


def test_a_class_that_transformers_lacks_is_no_damage(copy, capsys):
    (copy / 'xhf_manifest.json').unlink()
    edit_json(copy / 'config.json', architectures=['OwnLlama'])
    assert run(copy, '--load') == SAME
    said = 'unchecked  load        OwnLlama is not a class of transformers, and its code'
    assert f'{said} is not in the folder: only code that has it can load it' in capsys.readouterr().out
    edit_json(copy / 'config.json', auto_map={'AutoModelForCausalLM': 'own.OwnLlama'})
    assert run(copy, '--load') == SAME
    assert f'{said} in the folder may not run: add --trust-remote-code' in capsys.readouterr().out


def test_load_an_adapter(model, tmp_path, capsys):
    """With peft, on the base model that its config names, or on another one."""
    adapter = tmp_path / 'adapter'
    lora = LoraConfig(r=4, target_modules=['q_proj', 'v_proj'], task_type='CAUSAL_LM')
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora).save_pretrained(adapter)
    assert run(adapter, '--load') == SAME
    assert 'ok         load        PeftModelForCausalLM' in capsys.readouterr().out
    edit_json(adapter / 'adapter_config.json', base_model_name_or_path=str(tmp_path / 'none'))
    assert run(adapter, '--load') == DIFFERENT
    assert run(adapter, '--load', '--base', model) == SAME
    capsys.readouterr()
    tensors = load_file(adapter / 'adapter_model.safetensors')
    tensors.pop(next(iter(tensors)))
    save_file(tensors, adapter / 'adapter_model.safetensors')
    assert run(adapter, '--load', '--base', model) == DIFFERENT
    assert '1 missing: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('family', 'words'),
    {
        'llava': 'ok         generation',
        't5': 'ok         generation',
        'bert': 'BertForMaskedLM in',
        'clip': 'CLIPModel was not run: it takes more than text',
        'whisper': 'was not run: it takes input_features',
    }.items(),
)
def test_load_whatever_the_model_takes(family, words, tmp_path, capsys):
    build(family, models=MODELS).save_pretrained(tmp_path)
    assert run(tmp_path, '--load') == SAME
    said = capsys.readouterr().out
    assert f'ok         load        {MODELS[family][0]} in' in said and words in said


#: LoraConfig options, and what else is changed before training, of adapters that need another base than its files are.
ADAPTERS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    'of a classifier': (
        dict(task_type='SEQ_CLS'),
        lambda base: AutoModelForSequenceClassification.from_pretrained(base, num_labels=5),
    ),
    'of a classifier of tokens': (
        dict(task_type='TOKEN_CLS'),
        lambda base: AutoModelForTokenClassification.from_pretrained(base, num_labels=5),
    ),
    'with more tokens': (dict(task_type='CAUSAL_LM'), lambda base: resized(base)),
    'with more tokens, trained': (
        dict(task_type='CAUSAL_LM', modules_to_save=['embed_tokens', 'lm_head']),
        lambda base: resized(base),
    ),
}


def resized(base: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    return model


@pytest.mark.parametrize('kind', ADAPTERS)
def test_load_an_adapter_onto_what_it_was_trained_with(model, kind, tmp_path, capsys):
    """By its task, and with as many labels and tokens as it has."""
    options, base = ADAPTERS[kind]
    adapter = get_peft_model(base(model), LoraConfig(r=2, target_modules=['q_proj'], **options))
    save_hf(adapter, tmp_path / 'hook')
    adapter.save_pretrained(tmp_path / 'peft')
    for folder in ('hook', 'peft'):
        assert run(tmp_path / folder, '--load') == SAME, capsys.readouterr().out


def test_code_in_a_folder_is_not_run(copy, capsys):
    """Neither that of the config nor that of the tokenizer."""
    auto_map = {'AutoConfig': 'configuration_x.XConfig', 'AutoModelForCausalLM': 'someone/else--modeling_x.XModel'}
    edit_json(copy / 'config.json', auto_map=auto_map)
    edit_json(copy / 'tokenizer_config.json', auto_map={'AutoTokenizer': ['tokenization_x.XTokenizer', None]})
    for kind in ('configuration', 'modeling', 'tokenization'):
        (copy / f'{kind}_x.py').write_text('open(__file__ + ".ran", "w")')
    (copy / 'xhf_manifest.json').unlink()
    assert run(copy, '--load') == SAME
    assert 'ok         load' in capsys.readouterr().out and not list(copy.rglob('*.ran'))


@pytest.mark.parametrize('args', [[], ['a', 'b', '--load'], ['a', '--workers', '0']])
def test_bad_options(args):
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == UNUSABLE
