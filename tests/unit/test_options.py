"""Bad options are refused when the hook is built, not at iteration 500, and the message names the option."""

import inspect
import re
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from mmengine.registry import HOOKS, DefaultScope, Registry

from xhf_hooks import HFCheckpointHook, _build_hook, save_hf
from xhf_hooks.errors import OptionError
from xhf_hooks.integrations.transformers import HFCheckpointCallback
from xhf_hooks.offline.convert.conversion import ConvertOptions
from xhf_hooks.options import (
    CallbackOptions,
    CallOptions,
    HookOptions,
    SaveOptions,
    require_apart,
    require_uploads_apart,
)
from xhf_hooks.registry import register_hook

BAD = {
    'out_dir': ['', 5, b'folder', '~nobody-here/x', 's3://', 's3://bucket/run', 'hf://org/name', '/', ['folder']],
    'interval': [0, -2, 1.5, '10', True],
    'interval_minutes': [0, -1, '30', True, float('nan')],
    'save_at': [[], [0], [-1, 2], [1, 1], [4, 2], 8, '8', [1.0], [True], {1: 2}],
    'model_card': [None, 'yes'],
    'keep_every': [0, -1, 1.5, '1000', True],
    'save_last': [None, 'yes'],
    'save_best': [[], '', 5, ['acc', 'acc'], ['auto', 'acc'], {'acc': 1}],
    'max_keep_ckpts': [0, -2, 1.5, '3', None, True],
    'module': ['', 5, ['llm']],
    'lora': ['', 'merged', True, ['merge']],
    'llava_format': ['', 'official', 'xtuner_complete', True, ['xtuner']],
    'carry_base': ['', 'mtp', True, ['all']],
    'tokenizer': ['', 5, {}, {'path': 'folder'}, ['folder']],
    'dtype': ['', 'float8', 'bf16', 'int8', torch.int64, 16, 'F32'],
    'max_shard_size': [0, -1, 1.5, '', 'GB', '5XB', '-5GB', None, True],
    'bucket_size': [0, -1, 1.5, '', 'MB', '5XB', '-5MB', None, True],
    'on_error': ['', 'ignore', None, True],
    'writer': ['', 'fast', None, True],
    'async_save': [None, 'yes'],
    'verify': ['', 'all', 'off', None, True],
    'exit_wait_secs': [-1, '5', None, True, float('nan')],
    'save_on_signal': ['', 'USR1', 'SIGKILL', 10, True, ['SIGTERM', 'SIGSEGV'], [15], {'SIGTERM': 1}],
    'on_saved': ['', '   ', 5, True, [], [''], ['x', 5], "sh -c 'unclosed", print],
    'upload_to': ['', 5, 'folder', '/folder', 's3:/bucket', ['s3://bucket']],
    'upload_keep': [0, -2, 1.5, '3', None, True],
    'storage_options': ['', 5, ['endpoint_url']],
    'ema': [None, 'averaged'],
}
BAD_COMBINATIONS = [
    ('by_epoch', dict(by_epoch=True)),  # interval None follows CheckpointHook, which says what it counts
    ('by_epoch', dict(by_epoch='iter', interval=2)),
    ('rule', dict(rule='greater')),
    ('rule', dict(save_best='no_rule_can_be_inferred_for_this')),
    ('rule', dict(save_best='acc', rule='bigger')),
    ('rule', dict(save_best='acc', rule=5)),
    ('rule', dict(save_best=['acc', 'loss', 'mAP'], rule=['greater', 'less'])),
    ('out_dir', dict(out_dir='s3://key:secret@bucket/run')),
    ('upload_to', dict(upload_to='s3://key:secret@bucket/run')),
    ('upload_to', dict(upload_to='s3://bucket/run?X-Signature=secret')),
    ('upload_to', dict(upload_to='hf://org/name')),
    ('upload_to', dict(upload_to='hf://datasets/org/name/run')),
    ('upload_to', dict(upload_to='hf://buckets/org')),
    ('upload_keep', dict(upload_keep=2)),
    ('keep_every', dict(max_keep_ckpts=-1, keep_every=1000)),
    ('storage_options', dict(storage_options=dict(endpoint_url='http://host'))),
    ('storage_options', dict(upload_to='s3://bucket/run', storage_options=dict(backend='petrel'))),
    ('storage_options', dict(upload_to='s3://bucket/run', storage_options={'client_kwargs': {1: 2}})),
]

GOOD = [
    {},
    dict(out_dir=Path('~/folder')),
    dict(interval=500, by_epoch=False, save_last=False),
    dict(save_best=['acc', 'loss'], rule=['greater', 'less']),
    dict(max_keep_ckpts=-1),
    dict(interval=-1, interval_minutes=0.5, keep_every=1000),
    dict(interval=500, save_at=[1, 2, 4, 8], keep_every=1000),
    dict(save_at=range(1, 10, 3)),
    dict(max_keep_ckpts=-1, keep_every=1000, upload_to='s3://bucket/run', upload_keep=1),
    dict(module='llm.model', ema=False),
    dict(writer='positional', async_save=True, exit_wait_secs=0),
    dict(save_on_signal=['SIGTERM', 'SIGINT', 'SIGTERM']),
    dict(on_saved='lm_eval --model_args pretrained={path}'),
    dict(on_saved=['sh', '-c', 'echo "${HOME}" | awk \'{print}\'']),
    dict(on_saved='ls {path}', upload_to='s3://bucket/run'),
    dict(upload_to='s3://bucket/run', upload_keep=3, storage_options=dict(endpoint_url='http://host')),
    dict(out_dir='/local/disk/run', max_keep_ckpts=2, upload_to='s3://bucket/run'),
    dict(upload_to='hf://buckets/org/name', upload_keep=3),
    dict(upload_to='hf://buckets/org/name/runs/1/', storage_options=dict(endpoint='https://hub')),
    dict(tokenizer=dict(type='transformers.AutoTokenizer.from_pretrained')),
    dict(dtype='bfloat16', max_shard_size=10**9, bucket_size='64MiB', on_error='raise'),
]


@pytest.mark.parametrize(('option', 'value'), [(option, value) for option in BAD for value in BAD[option]], ids=repr)
def test_bad_value(option, value):
    with pytest.raises(OptionError, match=option) as caught:
        HFCheckpointHook(**{option: value})
    assert option in caught.value.option
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(('option', 'options'), BAD_COMBINATIONS)
def test_bad_combination(option, options):
    with pytest.raises(OptionError, match=option) as caught:
        HFCheckpointHook(**options)
    assert 'secret' not in str(caught.value)


@pytest.mark.parametrize('front', [HFCheckpointHook, HFCheckpointCallback, partial(save_hf, None)])
def test_a_store_as_out_dir_is_refused_with_what_to_use_instead(front):
    with pytest.raises(OptionError, match=r'out_dir.*upload_to.*s3://bucket/run'):
        front(out_dir='s3://bucket/run')


@pytest.mark.parametrize('options', GOOD, ids=str)
def test_good_options(options):
    HFCheckpointHook(**options)


def test_every_option_but_the_trivial_is_tried():
    options = set(inspect.signature(HFCheckpointHook).parameters)
    assert options == {*BAD, 'by_epoch', 'rule'}


def test_a_misspelt_option_in_a_config():
    with pytest.raises(TypeError, match="unexpected keyword argument 'safe_best'"):
        HOOKS.build(dict(type='HFCheckpointHook', safe_best='auto'))


@pytest.mark.parametrize('scope', ['mmengine', 'theirs'])
def test_a_name_that_something_else_has_is_refused(monkeypatch, scope):
    """In MMEngine's registry, or in that of a project, where names are looked up first."""
    monkeypatch.setattr(HOOKS, '_module_dict', {**HOOKS.module_dict})
    monkeypatch.setattr(HOOKS, '_children', {**HOOKS.children})
    monkeypatch.setattr(DefaultScope, '_instance_dict', {})  # of a runner of another test
    registry = HOOKS if scope == 'mmengine' else Registry('hook', parent=HOOKS, scope=scope)
    theirs = type('HFCheckpointHook', (), {'__module__': 'theirs.hooks'})
    registry.register_module(module=theirs, force=True)
    register_hook('HFCheckpointHook', _build_hook)  # as when the package is imported
    register_hook('HFCheckpointHook', HFCheckpointHook)
    both = re.escape("expected 'xhf_hooks.HFCheckpointHook', or 'theirs.hooks.HFCheckpointHook'")
    with pytest.raises(OptionError, match=both):
        registry.build(dict(type='HFCheckpointHook', interval=5))
    assert isinstance(registry.build(dict(type='xhf_hooks.HFCheckpointHook')), HFCheckpointHook)
    assert isinstance(registry.build(dict(type=theirs)), theirs)
    if registry is not HOOKS:
        assert isinstance(HOOKS.build(dict(type='HFCheckpointHook')), HFCheckpointHook)


def test_save_hf_has_the_options_that_are_described_for_it():
    """Its signature is written by hand."""
    signature = dict(inspect.signature(save_hf).parameters)
    assert list(signature)[:2] == ['model', 'out_dir'] and not signature.keys() & {'args', 'given', 'options'}
    described = {option.name: option for option in fields(CallOptions)}
    assert signature.keys() - {'model', 'out_dir'} == described.keys()
    for name, option in described.items():
        assert (signature[name].default, signature[name].annotation) == (option.default, option.type), name


def test_a_command_is_split_as_a_shell_does():
    assert HFCheckpointHook(on_saved="a 'b c' {path}").options.on_saved == ('a', 'b c', '{path}')
    assert HFCheckpointHook(on_saved=['a', 'b c']).options.on_saved == ('a', 'b c')


def test_what_the_package_has_is_shown():
    import xhf_hooks

    assert {'HFCheckpointCallback', 'HFCheckpointHook', 'save_hf'} <= {*dir(xhf_hooks)}
    assert xhf_hooks.HFCheckpointCallback.__name__ == 'HFCheckpointCallback'


@pytest.mark.parametrize(
    ('door', 'name', 'said'),
    [
        (HFCheckpointHook, 'intervall', "unexpected keyword argument 'intervall'"),
        (HFCheckpointHook, 'backend_args', "no option 'backend_args'; here it is called 'storage_options'"),
        (HFCheckpointCallback, 'max_keep_ckpts', "no option 'max_keep_ckpts'; here it is called 'save_total_limit'"),
        (HFCheckpointCallback, 'llava_format', "unexpected keyword argument 'llava_format'"),
    ],
)
def test_there_is_no_such_option(door, name, said):
    with pytest.raises(TypeError, match=said):
        door(**{name: 5})


@pytest.mark.parametrize(
    ('door', 'options'),
    [(HFCheckpointHook, HookOptions), (HFCheckpointCallback, CallbackOptions), (save_hf, CallOptions)],
)
def test_help_has_the_meaning_of_each_option(door, options):
    said = inspect.getdoc(door)
    assert len(fields(options)) > 10
    assert [o.name for o in fields(options) if f'    {o.name}: {o.metadata["meaning"]}' not in said] == []


@pytest.mark.parametrize('door', [HFCheckpointHook, HFCheckpointCallback])
def test_out_dir_alone_goes_by_its_place(door):
    kinds = {name: parameter.kind.name for name, parameter in inspect.signature(door).parameters.items()}
    assert kinds.pop('out_dir') == 'POSITIONAL_OR_KEYWORD' and {*kinds.values()} == {'KEYWORD_ONLY'}


@pytest.mark.parametrize('out_dir', ['out', 'out/.', '.', '/'])
def test_out_dir_neither_is_nor_holds_what_the_trainer_writes_into(out_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r'option out_dir: expected .* holds up/../out, the output_dir of Trainer, '):
        require_apart(Path(out_dir), Path('up/../out'), 'the output_dir of Trainer')
    require_apart(Path('out/hf_model'), Path('out'), 'the output_dir of Trainer')
    require_apart(Path('out2'), Path('out'), 'the output_dir of Trainer')


def test_uploads_do_not_go_where_saves_go(tmp_path):
    out_dir = tmp_path / 'a b' / 'hf_model'
    out_dir.mkdir(parents=True)
    (tmp_path / 'link').symlink_to(tmp_path / 'a b')
    for store in (out_dir.parent, out_dir, out_dir / 'store', tmp_path / 'link', tmp_path / 'link' / 'hf_model'):
        for url in (store.as_uri(), f'local://{store}'):
            with pytest.raises(OptionError, match='option upload_to: expected another folder than '):
                require_uploads_apart(url, out_dir)
    for url in (f'file://{tmp_path}', f'file://{tmp_path}/a b/store', 's3://bucket/a b', 'memory://a'):
        require_uploads_apart(url, out_dir)


#: What a hook does in the course of a run, or between ranks. A conversion takes the tokenizer beside the checkpoint.
NOT_OF_CONVERSIONS = {'tokenizer', 'bucket_size', 'writer', 'max_keep_ckpts', 'keep_every', 'async_save'}


def test_xhf_convert_has_the_options_of_what_a_save_holds():
    of_saves = {option.name for option in fields(SaveOptions)} - NOT_OF_CONVERSIONS
    of_conversions = {option.name.replace('max_shard_nbytes', 'max_shard_size') for option in fields(ConvertOptions)}
    assert of_saves - of_conversions == set()
