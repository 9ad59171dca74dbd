"""The command xhf-verify: exit status, what it prints where, and loading."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.helpers.models.model_folder import edit_json, flip, save_model, write_manifest
from tests.helpers.models.zoo import build, projector
from xhf_hooks import save_hf
from xhf_hooks.offline.commands.verify import DIFFERENT, SAME, UNUSABLE, main

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


@pytest.mark.parametrize('paths', [['.'], ['--compare', 'none', 'model'], ['--compare', 'model', 'none']])
def test_unusable(model, tmp_path, paths, capsys):
    named = {'none': tmp_path / 'none', '.': tmp_path, 'model': model}
    assert run(*(named.get(path, path) for path in paths)) == UNUSABLE
    said = capsys.readouterr()
    assert said.out == '' and len(said.err.splitlines()) == 1 and said.err.startswith('xhf-verify: ')


def test_each_of_several_saves_is_checked(model, copy, tmp_path, capsys):
    """What a shell makes of work_dirs/NAME/*/hf_model after a second run."""
    other = save_model('qwen2', tmp_path / 'other')
    assert run(model, copy, other) == SAME
    verdicts = [line for line in capsys.readouterr().out.splitlines() if ': good (' in line]
    assert [line.partition(': good')[0] for line in verdicts] == [str(model), str(copy), str(other)]
    flip(copy / WEIGHTS, -1)
    assert run(model, copy, other, '--json') == DIFFERENT
    assert [found['good'] for found in json.loads(capsys.readouterr().out)] == [True, False, True]
    assert run(tmp_path / 'none', other) == UNUSABLE
    said = capsys.readouterr()
    assert f'{tmp_path / "none"}: no such folder' in said.err and f'{other}: good' in said.out


def test_the_same_rounded_and_different(model, copy, capsys):
    assert run('--compare', model, copy) == SAME
    assert capsys.readouterr().out.splitlines()[-1].startswith('identical: 21 identical, 0 rounding, 0 different (')
    tensors = load_file(copy / WEIGHTS)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, copy / WEIGHTS)
    assert run('--compare', model, copy) == SAME
    said = capsys.readouterr().out
    assert 'the same but for rounding: 0 identical, 21 rounding' in said and 'rounded to BF16' in said
    tensors['lm_head.weight'][3, 3] += 1
    save_file(tensors, copy / WEIGHTS)
    assert run('--compare', model, copy) == DIFFERENT
    said = capsys.readouterr().out
    assert 'different' in said.splitlines()[3] and 'lm_head.weight' in said.splitlines()[3]
    assert run('--compare', model, copy, '--json') == DIFFERENT
    content = json.loads(capsys.readouterr().out)
    assert content['verdict'] == 'different' and content['tensors'][0]['max_abs'] == 1.0


def test_the_same_weights_with_another_config(model, copy, capsys):
    edit_json(copy / 'config.json', num_attention_heads=1)
    assert run('--compare', model, copy) == DIFFERENT
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith('same weights, other config: num_attention_heads 5, 1: 21 identical')
    assert run('--compare', model, copy, '--json') == DIFFERENT
    content = json.loads(capsys.readouterr().out)
    assert (content['verdict'], content['same']) == ('other config', False)


def test_a_folder_whose_index_names_a_missing_file_is_not_compared(tmp_path, capsys):
    folder = save_model('llama', tmp_path / 'shards', max_shard_size='100KB')
    min(folder.glob('*.safetensors')).unlink()
    assert run('--compare', folder, folder) == UNUSABLE
    assert 'the index names files that are missing' in capsys.readouterr().err


def loading(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    """Kinds and texts of the findings about loading, of a run with ``--json``."""
    findings = json.loads(capsys.readouterr().out)['findings']
    return [(one['kind'], one['text']) for one in findings if one['check'] == 'load']


def test_load(model, capsys):
    assert run(model, '--load', '--json') == SAME
    ((kind, text),) = loading(capsys)
    assert kind == 'ok' and re.fullmatch(r'LlamaForCausalLM in [\d.]+ s, without weights', text)


@pytest.mark.parametrize(
    ('edit', 'words'),
    [
        ({'num_attention_heads': 'eight'}, 'config.json cannot be loaded ('),
        ({'hidden_act': 'none of these'}, 'LlamaForCausalLM cannot be built from config.json ('),
    ],
)
def test_load_tells_a_config_of_which_no_model_can_be_built(copy, edit, words, capsys):
    (copy / 'xhf_manifest.json').unlink()
    edit_json(copy / 'config.json', **edit)
    assert run(copy, '--load', '--json') == DIFFERENT
    ((kind, text),) = loading(capsys)
    assert kind == 'problem' and text.startswith(words)


@pytest.mark.parametrize(
    ('edit', 'words'),
    [
        ({'quantization_config': {'quant_method': 'gptq', 'bits': 4}}, 'LlamaForCausalLM is quantized, and '),
        ({'architectures': None}, 'config.json names no class of a model'),
        ({'model_type': 'of_tomorrow'}, f"transformers {transformers.__version__} has no model_type 'of_tomorrow'"),
    ],
)
def test_what_cannot_be_tried_here_is_no_damage(copy, edit, words, capsys):
    (copy / 'xhf_manifest.json').unlink()
    edit_json(copy / 'config.json', **edit)
    assert run(copy, '--load', '--json') == SAME
    ((kind, text),) = loading(capsys)
    assert kind == 'unchecked' and text.startswith(words)


def test_packages_that_are_not_here_are_no_damage(model, tmp_path):
    """In a process that cannot import them. Without accelerate, transformers loads nothing onto the meta device."""
    lora = LoraConfig(r=4, target_modules=['q_proj'], task_type='CAUSAL_LM')
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora).save_pretrained(tmp_path / 'adapter')
    code = """
import importlib.util, sys
find, lacking = importlib.util.find_spec, ('accelerate', 'peft')
importlib.util.find_spec = lambda name, package=None: None if name in lacking else find(name, package)
sys.modules.update(dict.fromkeys(lacking))
from xhf_hooks.offline.commands.verify import main
sys.exit(main([*sys.argv[1:], '--load', '--json']))
"""
    command = [sys.executable, '-c', code, str(model), str(tmp_path / 'adapter')]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == SAME, done.stderr
    for folder, package in zip(json.loads(done.stdout), ('accelerate', 'peft'), strict=True):
        ((kind, text),) = [(one['kind'], one['text']) for one in folder['findings'] if one['check'] == 'load']
        assert kind == 'unchecked' and package in text


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


def test_a_projector_of_xtuner_needs_its_code(tmp_path, capsys):
    """Pretraining of a LLaVA in XTuner's layout writes nothing else."""
    projector.ProjectorModel(projector.ProjectorConfig()).save_pretrained(tmp_path / 'projector')
    assert run(tmp_path / 'projector', '--load', '--json') == SAME
    ((kind, text),) = loading(capsys)
    assert kind == 'unchecked' and 'add --trust-remote-code' in text


def test_load_an_adapter(model, tmp_path, capsys):
    """With peft, on the base model that its config names, or on another one."""
    adapter = tmp_path / 'adapter'
    lora = LoraConfig(r=4, target_modules=['q_proj', 'v_proj'], task_type='CAUSAL_LM')
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora).save_pretrained(adapter)
    assert run(adapter, '--load') == SAME
    assert 'ok         load        adapter of a LlamaForCausalLM in' in capsys.readouterr().out
    (tmp_path / 'base').mkdir()
    shutil.copy(model / 'config.json', tmp_path / 'base')
    edit_json(adapter / 'adapter_config.json', base_model_name_or_path=str(tmp_path / 'none'))
    assert run(adapter, '--load', '--json') == SAME
    ((kind, text),) = loading(capsys)
    assert kind == 'unchecked' and text.startswith(f'the base of this adapter cannot be used here: {tmp_path}/none')
    assert run(adapter, '--load', '--base', tmp_path / 'none') == UNUSABLE
    assert run(adapter, '--load', '--base', tmp_path / 'base') == SAME, 'needs no weights of the base'
    capsys.readouterr()
    tensors = load_file(adapter / 'adapter_model.safetensors')
    tensors.pop(next(iter(tensors)))
    save_file(tensors, adapter / 'adapter_model.safetensors')
    assert run(adapter, '--load', '--base', model) == DIFFERENT
    assert '1 missing: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' in capsys.readouterr().out


@pytest.mark.parametrize('family', ['llava', 't5', 'bert', 'clip', 'whisper', 'donut', 'mixtral'])
def test_load_whatever_the_model_takes(family, tmp_path, capsys):
    model = build(family)
    model.save_pretrained(tmp_path)
    assert run(tmp_path, '--load') == SAME
    assert f'ok         load        {type(model).__name__} in' in capsys.readouterr().out


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


@pytest.mark.parametrize('args', [[], ['--compare', 'a', 'b', '--load'], ['a', '--workers', '0']])
def test_bad_options(args):
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == UNUSABLE
