"""The hook in whole MMEngine runs: when it saves, where, what, and what it refuses before training."""

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.visualization import Visualizer
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from tests.helpers.checks.compare import assert_loads_clean
from tests.helpers.models.model_folder import save_tokenizer
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.hook_runs import log_dir_of, log_of, refusal_of, run, saves

#: MMEngine's own default.
EPOCHS = dict(type='CheckpointHook', interval=1)
DDP = dict(stage=None, ddp=True)

#: The command for the first save looks at it when the last one has taken its place.
LOOKS = """
import json, sys, time
from pathlib import Path
path, step, output = sys.argv[1:]
iteration = lambda folder: json.loads(Path(folder, 'xhf_manifest.json').read_text())['iteration']
while step == '2' and iteration(Path(output).parents[1] / 'hf_model') < 6:
    time.sleep(0.05)
print('a line before')
print(json.dumps({'iteration': iteration(path), 'nbytes': Path(path, 'model.safetensors').stat().st_size}))
"""
ON_SAVED = [sys.executable, '-c', LOOKS, '{path}', '{step}', '{output}']

#: Name to the options of `run_config`.
RUNS: dict[str, dict[str, Any]] = {
    'zero3': dict(hook={}, stage=3),
    'only_last': dict(hook=dict(interval=-1), max_iters=5, **DDP),
    'keep_two': dict(hook=dict(interval=3, max_keep_ckpts=2), max_iters=7, checkpoint=EPOCHS, **DDP),
    'epochs': dict(hook=dict(max_keep_ckpts=-1, interval=1), epochs=2, **DDP),
    'iterations_of_epochs': dict(
        hook=dict(max_keep_ckpts=-1, interval=5, by_epoch=False), epochs=2, checkpoint=EPOCHS, **DDP
    ),
    'one_long_epoch': dict(hook=dict(max_keep_ckpts=-1), checkpoint=EPOCHS, **DDP),
    'never_due': dict(hook=dict(max_keep_ckpts=-1, interval=500), **DDP),
    'save_at': dict(hook=dict(interval=4, save_at=[1, 4, 6, 500], keep_every=5), max_iters=7, **DDP),
    'on_saved': dict(hook=dict(interval=2, by_epoch=False, async_save=True, on_saved=ON_SAVED), stage=3, max_iters=6),
}
#: Name to what is there at last, by iteration, the saves that are logged, and warnings.
SCHEDULES: dict[str, tuple[dict[str, int], list[str], list[str]]] = {
    'zero3': ({'hf_model': 4}, ['iter_2', 'iter_4'], []),
    'only_last': ({'hf_model': 5}, ['iter_5'], []),
    'keep_two': ({'hf_model': 7, 'hf_model_iter_6': 6}, ['iter_3', 'iter_6', 'iter_7'], []),
    'epochs': ({'hf_model': 8, 'hf_model_epoch_1': 4}, ['epoch_1', 'epoch_2'], []),
    'iterations_of_epochs': ({'hf_model': 8, 'hf_model_iter_5': 5}, ['iter_5', 'iter_8'], []),
    'one_long_epoch': ({'hf_model': 4}, ['iter_4'], ['every epoch, but this train loop counts iterations']),
    'save_at': (
        {'hf_model': 7, 'hf_model_iter_6': 6},
        ['iter_1', 'iter_4', 'iter_6', 'iter_7'],
        [],
    ),
    'never_due': ({'hf_model': 4}, ['iter_4'], ['every 500 iterations, but training ends after 4 iterations']),
}


def beside_others(work_dir: Path) -> str:
    """Another hook has the same name, as XTuner's does; and the visualizer fails on rank 0. Runs on: all ranks."""
    add_scalars = Visualizer.add_scalars

    def fail(self: Any, numbers: dict[str, Any], **options: Any) -> None:
        if 'hf_checkpoint/seconds' in numbers:
            raise OSError('injected')
        add_scalars(self, numbers, **options)

    HOOKS.register_module(name='Theirs', module=type('HFCheckpointHook', (Hook,), {'__module__': 'theirs.hooks'}))
    with mock.patch.object(Visualizer, 'add_scalars', fail):
        return run(dict(hook=dict(save_best='auto'), hooks=[dict(type='Theirs')], max_iters=2, **DDP), work_dir)


#: Name to the options of `run_config`, and expected in the message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    'nothing_is_ever_due': (dict(hook=dict(interval=500, save_last=False)), 'option interval'),
    'no_tokenizer_there': (dict(hook=dict(tokenizer='/nowhere')), 'option tokenizer'),
    'adapter_not_trained': (dict(hook={}, model=dict(lora=True, freeze='lora_')), 'have no trainable tensors'),
    'no_such_template': (dict(hook={}, prompt_template='xtuner.utils.PROMPT_TEMPLATE.nope'), 'option prompt_template'),
}


TOKENIZER_SOURCES = ('option_folder', 'base_model', 'run_config')
PROMPT_TEMPLATE = dict(INSTRUCTION='user: {input} bot: ', SUFFIX='', SUFFIX_AS_EOS=False, SEP='', STOP_WORDS=['w1'])


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('runs')
    save_tokenizer(root / 'tokenizer', 131)
    folder = str(root / 'tokenizer')
    by_name = dict(type='transformers.AutoTokenizer.from_pretrained', pretrained_model_name_or_path=folder)
    sources: dict[str, dict[str, Any]] = {
        'option_folder': dict(hook=dict(tokenizer=folder)),
        'base_model': dict(hook={}, model=dict(base=folder)),
        'run_config': dict(hook={}, tokenizer=by_name, prompt_template=PROMPT_TEMPLATE),
    }
    scenarios: dict[str, Any] = {name: partial(run, options, root / name) for name, options in RUNS.items()}
    for source, options in sources.items():
        scenarios[source] = partial(run, dict(options, max_iters=2, **DDP), root / source)
    scenarios['beside_others'] = partial(beside_others, root / 'beside_others')
    for name, (options, _) in REFUSED.items():
        scenarios[name] = partial(refusal_of, partial(run, {**options, **DDP}, root / name))
    return run_scenarios(scenarios, 2, root=root)


def scalars(log_dir: Path, prefix: str) -> dict[int, dict[str, float]]:
    """By the step that the visualizer was given."""
    lines = [json.loads(line) for line in (log_dir / 'vis_data' / 'scalars.json').read_text().splitlines()]
    found = [line for line in lines if any(name.startswith(prefix) for name in line)]
    return {line['step']: {k.removeprefix(prefix): v for k, v in line.items() if k != 'step'} for line in found}


@pytest.mark.parametrize('name', ['zero3', 'only_last'])
def test_folder_loads(finished, name):
    log_dir = log_dir_of(finished, name)
    assert log_dir.parent == finished.root / name
    model = assert_loads_clean(log_dir / 'hf_model', LlamaForCausalLM)
    assert model.config.use_cache is True, 'the training code set it to False on the live config'
    assert sorted(path.name for path in log_dir.iterdir() if path.name.startswith('.')) == []


@pytest.mark.parametrize('name', SCHEDULES)
def test_saves_when_and_where_it_should_and_says_so(finished, name):
    expected, labels, warnings = SCHEDULES[name]
    log_dir = log_dir_of(finished, name)
    assert saves(log_dir) == expected
    assert re.findall(r'HFCheckpointHook: saved (\w+) to', log_of(log_dir)) == labels
    told = re.findall(r'WARNING - HFCheckpointHook: interval: (.*)', log_of(log_dir))
    assert len(told) == len(warnings) and all(part in text for part, text in zip(warnings, told, strict=True)), told


def test_save_best_without_a_validation_and_another_hook_of_this_name_are_told(finished):
    log = log_of(log_dir_of(finished, 'beside_others'))
    assert log.count('WARNING - HFCheckpointHook: save_best: no validation during training') == 1
    assert 'ready to save' in log and 'best score' not in log
    assert log.count('custom_hooks also has theirs.hooks.HFCheckpointHook, and both run: remove it') == 1


def test_a_visualizer_that_fails_ends_neither_a_save_nor_a_run(finished):
    log_dir = log_dir_of(finished, 'beside_others')
    assert 'is saved, but a callback failed: OSError: injected' in log_of(log_dir)
    assert saves(log_dir) == {'hf_model': 2}


@pytest.mark.parametrize('source', TOKENIZER_SOURCES)
def test_tokenizer_is_saved_and_a_prompt_template_becomes_its_chat_template(finished, source):
    folder = log_dir_of(finished, source) / 'hf_model'
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer('w0 w1')['input_ids'] == [4, 5]
    assert (tokenizer.chat_template is None) == (source != 'run_config')
    if source == 'run_config':
        dialogue = [{'role': 'user', 'content': 'w0'}]
        text = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
        assert text == '<s>user: w0 bot: '
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [2, 5]


def test_costs_are_logged_and_go_to_the_visualizer(finished):
    log_dir = log_dir_of(finished, 'zero3')
    costs = scalars(log_dir, 'hf_checkpoint/')
    assert [*costs] == [2, 4]
    for cost in costs.values():
        assert cost['nbytes'] > 0
        assert all(0 < cost[f'{stage}seconds'] < 60 for stage in ('', 'plan_', 'write_', 'commit_'))
    log = log_of(log_dir)
    assert '21 tensors' in log and 'saved iter_4 to' in log and 'every 2 iterations' in log


def test_a_command_sees_the_save_that_others_have_followed(finished):
    log_dir = log_dir_of(finished, 'on_saved')
    assert saves(log_dir) == {'hf_model': 6} and not [*log_dir.glob('.hf_model*kept*')]
    found = scalars(log_dir, 'on_saved/hf_model/')
    assert min(found) == 2 and max(found) == 6
    nbytes = (log_dir / 'hf_model' / 'model.safetensors').stat().st_size
    for step, numbers in found.items():
        assert numbers == {'iteration': step, 'nbytes': nbytes}
        assert 'a line before' in (log_dir / 'hf_model_on_saved' / f'iter_{step}' / 'output.log').read_text()
    assert 'on_saved for hf_model, iter_6 took' in log_of(log_dir)


@pytest.mark.parametrize('name', REFUSED)
def test_refused_before_training(finished, name):
    messages = set(check(finished, name))
    assert len(messages) == 1
    assert REFUSED[name][1] in messages.pop()
