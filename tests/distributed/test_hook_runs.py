"""The hook in whole MMEngine runs: when it saves, where, what, and what it refuses before training."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.compare import assert_loads_clean, folder_tensors
from tests.helpers.scenarios import check, run_scenarios

BY_ITER = {'interval': 2, 'by_epoch': False}
#: MMEngine's own default.
EPOCHS = dict(type='CheckpointHook', interval=1)

#: Name to the options of `run_config`.
RUNS: dict[str, dict[str, Any]] = {
    'defaults': dict(hook={}, stage=3),
    'zero2': dict(hook={}, stage=2),
    'runner': dict(hook={}, stage=None, ddp=True),
    'keep_two': dict(hook=dict(max_keep_ckpts=2), stage=3, max_iters=6),
    'own_interval': dict(hook=dict(max_keep_ckpts=-1, interval=3, by_epoch=False, save_last=False), stage=2),
    'only_last': dict(hook=dict(interval=-1), stage=2, max_iters=5),
    'loop_of_iterations': dict(
        hook=dict(max_keep_ckpts=-1, interval=3), stage=None, ddp=True, max_iters=7, checkpoint=EPOCHS
    ),
    'loop_of_epochs': dict(hook=dict(max_keep_ckpts=-1, interval=1), stage=None, ddp=True, epochs=2),
    'iterations_of_epochs': dict(
        hook=dict(max_keep_ckpts=-1, interval=20, by_epoch=False), stage=None, ddp=True, epochs=2, checkpoint=EPOCHS
    ),
    'one_long_epoch': dict(hook=dict(max_keep_ckpts=-1), stage=None, ddp=True, checkpoint=EPOCHS),
    'never_due': dict(hook=dict(max_keep_ckpts=-1, interval=500), stage=None, ddp=True),
    'float32_zero2': dict(hook=dict(dtype='float32'), stage=2),
    'float32_zero3': dict(hook=dict(dtype='float32'), stage=3),
    'float32_frozen': dict(hook=dict(dtype='float32'), stage=3, model=dict(freeze='embed_tokens')),
    'float16': dict(hook=dict(dtype='float16'), stage=3),
    'fp32_training': dict(hook={}, stage=3, bf16=False),
    'sharded': dict(hook=dict(max_shard_size='20KB', bucket_size='10KB'), stage=3, model=dict(tied=True)),
    'best': dict(hook=dict(save_best='acc', **BY_ITER), stage=3, max_iters=8, scores=[0.5, 0.7, 0.6, 0.4]),
}


def run(options: dict[str, Any], work_dir: Path) -> str:
    """Runs on: all ranks."""
    from tests.helpers.toy_run import run_config, train

    return train(run_config(work_dir, **options)).log_dir


def with_tokenizer(source: str, work_dir: Path) -> str:
    """The tokenizer comes from the named place. Runs on: all ranks."""
    folder = str(work_dir.parent / 'tokenizer')
    by_name = dict(type='transformers.AutoTokenizer.from_pretrained', pretrained_model_name_or_path=folder)
    options: dict[str, Any] = {
        'option_folder': dict(hook=dict(tokenizer=folder)),
        'option_config': dict(hook=dict(tokenizer=by_name)),
        'run_config': dict(hook={}, tokenizer=by_name),
        'base_model': dict(hook={}, model=dict(base=folder)),
        'prompt_template': dict(hook={}, tokenizer=by_name, prompt_template=PROMPT_TEMPLATE),
    }[source]
    return run(dict(options, stage=3, max_iters=2), work_dir)


def best_after_resume(work_dir: Path) -> list[Any]:
    """The first part reaches 0.7 at iteration 4, the second never more than 0.6. Runs on: all ranks."""
    common = dict(hook=dict(save_best='acc', **BY_ITER), stage=3)
    first = run(dict(common, max_iters=6, scores=[0.5, 0.7, 0.1]), work_dir)
    second = run(dict(common, max_iters=10, scores=[0.6, 0.6], resume=True), work_dir)
    return [first, second]


def failing_save(on_error: str, work_dir: Path) -> list[Any]:
    """The second save fails on rank 1; 'continue' goes on to the third, 'raise' ends the run."""
    import torch.distributed as dist

    from xhf_hooks.errors import AgreedError
    from xhf_hooks.sources import Zero3Source

    calls, gather = [], Zero3Source._gather_partitions

    def fail_in_second_save(*args: Any) -> dict[str, Any]:
        calls.append(args)  # once a save: the toy is one bucket
        found = gather(*args)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise MemoryError('injected')
        return found

    with mock.patch.object(Zero3Source, '_gather_partitions', fail_in_second_save):
        try:
            hook = dict(on_error=on_error, max_keep_ckpts=-1, writer='gather')
            log_dir = run(dict(hook=hook, stage=3, max_iters=6), work_dir)
            return ['ended', log_dir]
        except AgreedError as error:
            return ['raised', str(error)]


def refused(options: dict[str, Any], prepare: str, work_dir: Path) -> str:
    """The message of a run that must not start. Runs on: all ranks."""
    import torch.distributed as dist

    from tests.helpers.toy_run import ToyLM
    from xhf_hooks.errors import XhfError

    if dist.get_rank() == 0:
        PREPARATIONS[prepare](work_dir)
    dist.barrier()
    with (
        mock.patch.object(ToyLM, 'forward', side_effect=AssertionError('training began')),
        pytest.raises(XhfError) as caught,
    ):
        run(dict(options, stage=3), work_dir)
    return str(caught.value)


def _make_file(work_dir: Path) -> None:
    work_dir.mkdir(parents=True)
    (work_dir / 'target').write_text('mine')


def _make_foreign_folder(work_dir: Path) -> None:
    (work_dir / 'target').mkdir(parents=True)
    (work_dir / 'target' / 'thesis.tex').write_text('mine')


def _hold_lock(work_dir: Path) -> None:
    from xhf_hooks.places.checkpoint_folder import CheckpointFolder

    _HELD.append(CheckpointFolder(work_dir / 'target', max_keep=1))
    _HELD[-1].claim()


def _make_read_only(work_dir: Path) -> None:
    import subprocess

    (work_dir / 'read_only').mkdir(parents=True)
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'ro,size=1m', 'tmpfs', work_dir / 'read_only'], check=True)


def _make_tiny_disk(work_dir: Path) -> None:
    import subprocess

    (work_dir / 'tiny').mkdir(parents=True)
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', work_dir / 'tiny'], check=True)


_HELD: list[Any] = []
PREPARATIONS = {
    'nothing': lambda work_dir: None,
    'file': _make_file,
    'foreign': _make_foreign_folder,
    'in_use': _hold_lock,
    'read_only': _make_read_only,
    'tiny': _make_tiny_disk,
}
#: Name to (out_dir below the work_dir, preparation, further options of the hook, expected in the message).
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    'target_is_a_file': ('target', 'file', {}, 'is not a folder'),
    'target_is_foreign': ('target', 'foreign', {}, 'did not write'),
    'target_in_use': ('target', 'in_use', {}, 'is in use by process'),
    'target_read_only': ('read_only/hf', 'read_only', {}, 'cannot be written'),
    'disk_too_small': ('tiny/hf', 'tiny', {}, 'B are needed'),
    'no_such_module': ('target', 'nothing', dict(module='llm.nothing'), 'option module'),
    'nothing_is_ever_due': ('target', 'nothing', dict(interval=500, save_last=False), 'option interval'),
    'no_tokenizer_there': ('target', 'nothing', dict(tokenizer='/nowhere'), 'option tokenizer'),
}
#: Name to (options of `run_config`, in which {root} is filled in; expected in the message).
REFUSED_INPUT: dict[str, tuple[dict[str, Any], str]] = {
    'adapter_not_trained': (dict(model=dict(lora=True, freeze='lora_')), 'has no trainable tensors'),
    'vocabulary_too_large': (
        dict(hook=dict(tokenizer='{root}/large_tokenizer')),
        'the tokenizer has 140 tokens, but the model has embeddings for 131: set the option tokenizer',
    ),
    'no_such_template': (
        dict(prompt_template='xtuner.utils.PROMPT_TEMPLATE.nope'),
        'option prompt_template: expected ',
    ),
}


TOKENIZER_SOURCES = ('option_folder', 'option_config', 'run_config', 'base_model')
PROMPT_TEMPLATE = dict(INSTRUCTION='user: {input} bot: ', SUFFIX='', SUFFIX_AS_EOS=False, SEP='', STOP_WORDS=['world'])
CHAT_TEMPLATE = '{{ messages[0].content }}'


def _make_tokenizer(folder: Path, *more: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(['<unk>', 'hello', 'world', *more])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token='<unk>'))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token='<unk>')
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('runs')
    scenarios: dict[str, Any] = {name: partial(run, options, root / name) for name, options in RUNS.items()}
    _make_tokenizer(root / 'tokenizer')
    _make_tokenizer(root / 'large_tokenizer', *(f'word{i}' for i in range(137)))
    for source in (*TOKENIZER_SOURCES, 'prompt_template'):
        scenarios[source] = partial(with_tokenizer, source, root / source)
    scenarios['best_after_resume'] = partial(best_after_resume, root / 'best_after_resume')
    for on_error in ('continue', 'raise'):
        scenarios[on_error] = partial(failing_save, on_error, root / on_error)
    for name, (out_dir, prepare, options, _) in REFUSED.items():
        hook = dict(out_dir=str(root / name / out_dir), **options)
        scenarios[name] = partial(refused, dict(hook=hook), prepare, root / name)
    for name, (options, _) in REFUSED_INPUT.items():
        options = _filled_in({'hook': {}, **options}, str(root))
        scenarios[name] = partial(refused, options, 'nothing', root / name)
    yield root, run_scenarios(scenarios, 2)
    _unmount(root)


def _filled_in(options: Any, root: str) -> Any:
    if isinstance(options, dict):
        return {name: _filled_in(value, root) for name, value in options.items()}
    return options.replace('{root}', root) if isinstance(options, str) else options


def _unmount(root: Path) -> None:
    import subprocess

    for disk in (root / 'target_read_only' / 'read_only', root / 'disk_too_small' / 'tiny'):
        subprocess.run(['umount', disk], check=True)


def log_dir_of(finished: Any, name: str) -> Path:
    values = check(finished[1], name)
    assert len(set(values)) == 1
    return Path(values[0])


def saves(log_dir: Path) -> dict[str, int]:
    """Name of each committed folder, to the iteration that it was saved at."""
    manifests = log_dir.glob('hf_model*/xhf_manifest.json')
    return {path.parent.name: json.loads(path.read_text())['iteration'] for path in manifests}


@pytest.mark.parametrize('name', ['defaults', 'zero2', 'runner', 'fp32_training', 'sharded', 'float16'])
def test_folder_loads(finished, name):
    from transformers import LlamaForCausalLM

    log_dir = log_dir_of(finished, name)
    assert log_dir.parent == finished[0] / name
    assert saves(log_dir) == {'hf_model': 4}
    model = assert_loads_clean(log_dir / 'hf_model', LlamaForCausalLM)
    assert model.config.use_cache is True, 'the training code set it to False on the live config'
    assert sorted(path.name for path in log_dir.iterdir() if path.name.startswith('.')) == []


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('keep_two', {'hf_model': 6, 'hf_model_iter_4': 4}),
        ('own_interval', {'hf_model': 3}),
        ('only_last', {'hf_model': 5}),
        ('loop_of_iterations', {'hf_model': 7, 'hf_model_iter_6': 6, 'hf_model_iter_3': 3}),
        ('loop_of_epochs', {'hf_model': 32, 'hf_model_epoch_1': 16}),
        ('iterations_of_epochs', {'hf_model': 32, 'hf_model_iter_20': 20}),
        ('one_long_epoch', {'hf_model': 4}),
        ('never_due', {'hf_model': 4}),
        ('best', {'hf_model': 8, 'hf_model_best': 4}),
    ],
)
def test_saves_when_and_where_it_should(finished, name, expected):
    assert saves(log_dir_of(finished, name)) == expected


@pytest.mark.parametrize(
    ('name', 'labels', 'warnings'),
    [
        ('loop_of_iterations', ['iter_3', 'iter_6', 'iter_7'], []),
        ('loop_of_epochs', ['epoch_1', 'epoch_2'], []),
        ('iterations_of_epochs', ['iter_20', 'iter_32'], []),
        ('one_long_epoch', ['iter_4'], ['every epoch, but this train loop counts iterations']),
        ('never_due', ['iter_4'], ['every 500 iterations, but training ends after 4 iterations']),
    ],
)
def test_what_the_log_says_of_when(finished, name, labels, warnings):
    log_dir = log_dir_of(finished, name)
    log = (log_dir / f'{log_dir.name}.log').read_text()
    assert re.findall(r'HFCheckpointHook: saved (\w+) to', log) == labels
    told = re.findall(r'WARNING - HFCheckpointHook: interval: (.*)', log)
    assert len(told) == len(warnings) and all(part in text for part, text in zip(warnings, told, strict=True)), told


def test_best_survives_a_resume(finished):
    first, second = check(finished[1], 'best_after_resume')[0]
    assert saves(Path(first)) == {'hf_model': 6, 'hf_model_best': 4}
    assert saves(Path(second)) == {'hf_model': 10}


@pytest.mark.parametrize('name', ['defaults', 'zero2', 'sharded'])
def test_weights_are_the_rounded_masters(finished, name):
    masters = zero_to_fp32(finished, name)
    saved = folder_tensors(log_dir_of(finished, name) / 'hf_model')
    for key, tensor in saved.items():
        assert torch.equal(tensor, masters[f'llm.{key}'].to(torch.bfloat16)), key


@pytest.mark.parametrize('name', ['float32_zero2', 'float32_zero3', 'float32_frozen'])
def test_float32_is_the_masters(finished, name):
    masters = zero_to_fp32(finished, name)
    saved = folder_tensors(log_dir_of(finished, name) / 'hf_model')
    assert set(masters) == {f'llm.{key}' for key in saved}
    rounded = 0
    for key, tensor in saved.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, masters[f'llm.{key}'].float()), key
        rounded += int((tensor != tensor.to(torch.bfloat16).float()).sum())
    assert rounded > 0, 'no master had more digits than bf16: the test would not see a wrong source'


def zero_to_fp32(finished: Any, name: str) -> dict[str, torch.Tensor]:
    """DeepSpeed's own reading of the run's last checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(finished[0] / name), tag='iter_4.pth')


@pytest.mark.parametrize('source', TOKENIZER_SOURCES)
def test_tokenizer_is_saved(finished, source):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(log_dir_of(finished, source) / 'hf_model')
    assert tokenizer('hello world')['input_ids'] == [1, 2]
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_prompt_template_becomes_the_chat_template(finished):
    from transformers import AutoTokenizer, GenerationConfig

    folder = log_dir_of(finished, 'prompt_template') / 'hf_model'
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dialogue = [{'role': 'user', 'content': 'hello'}]
    text = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
    assert text == 'user: hello bot: '
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [2]


def test_costs_are_logged_and_go_to_the_visualizer(finished):
    log_dir = log_dir_of(finished, 'defaults')
    lines = (log_dir / 'vis_data' / 'scalars.json').read_text().splitlines()
    costs = [json.loads(line) for line in lines if 'hf_checkpoint/seconds' in line]
    assert [cost['step'] for cost in costs] == [2, 4]
    assert all(cost['hf_checkpoint/nbytes'] > 0 for cost in costs)
    stages = [cost[f'hf_checkpoint/{stage}_seconds'] for cost in costs for stage in ('plan', 'write', 'commit')]
    assert all(0 < seconds < 60 for seconds in stages)
    log = (log_dir / f'{log_dir.name}.log').read_text()
    assert '21 tensors' in log and 'saved iter_4 to' in log and 'every 2 iterations' in log


def test_a_failed_save_does_not_end_the_run(finished):
    outcome, log_dir = check(finished[1], 'continue')[0]
    assert outcome == 'ended'
    assert saves(Path(log_dir)) == {'hf_model': 6, 'hf_model_iter_2': 2}
    log = (Path(log_dir) / f'{Path(log_dir).name}.log').read_text()
    assert 'the save of iter_4 failed and training goes on' in log and 'rank 1: MemoryError: injected' in log


def test_a_failed_save_ends_the_run_when_asked_to(finished):
    values = check(finished[1], 'raise')
    assert [value[0] for value in values] == ['raised', 'raised']
    assert values[0] == values[1]
    (kept,) = (finished[0] / 'raise').glob('*/hf_model')
    assert saves(kept.parent) == {'hf_model': 2}


@pytest.mark.parametrize('name', REFUSED)
def test_refused_before_training(finished, name):
    messages = set(check(finished[1], name))
    assert len(messages) == 1
    assert REFUSED[name][3] in messages.pop()


@pytest.mark.parametrize('name', REFUSED_INPUT)
def test_wrong_input_is_refused_before_training(finished, name):
    (message,) = set(check(finished[1], name))
    assert REFUSED_INPUT[name][1] in message
