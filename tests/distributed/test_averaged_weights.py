"""Runs with MMEngine's EMAHook: what is exported is what was scored, and what CheckpointHook writes, byte for byte."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS

from tests.helpers.checks.compare import folder_tensors
from tests.helpers.checks.converted import assert_same_files, convert
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.hook_runs import READS_OWN_CHECKPOINTS, log_of, refusal_of
from tests.helpers.runs.toy_run import run_config, train
from xhf_hooks.offline.commands.convert import BAD_INPUT, main
from xhf_hooks.offline.commands.verify import main as verify

EMA = dict(type='EMAHook', momentum=0.1)
EACH = dict(interval=2, by_epoch=False, max_keep_ckpts=-1)
SCORES = [0.5, 0.7]

#: Runs under DDP whose checkpoints hold the averaged weights, to options of `run`.
DDP: dict[str, dict[str, Any]] = {
    'begins_later': dict(ema=dict(EMA, begin_iter=3)),
    'stochastic_tied': dict(
        ema=dict(type='EMAHook', ema_type='StochasticWeightAverage'),
        model=dict(tied=True),
        hook=dict(async_save=True, **EACH),
    ),
}
#: Under DeepSpeed, whose checkpoints do not hold them; and its masters are those of the live weights.
ZERO2 = dict(stage=2, hook=dict(dtype='float32', async_save=True, **EACH))
#: Runs that must not begin: name to (options of `run`, in the message).
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    'zero3': (dict(stage=3), 'option ema: expected unpartitioned parameters'),
    'after_ours': (
        dict(stage=2, ema=dict(EMA, priority='LOWEST')),
        'option custom_hooks: expected EMAHook before HFCheckpointHook',
    ),
}


@HOOKS.register_module()
class NoteScoredWeights(Hook):
    """Writes ``scored_<iteration>.pt``: the model while validation has its weights."""

    priority = 'LOWEST'

    def before_val_epoch(self, runner: Any) -> None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        if runner.rank == 0:
            torch.save(model.llm.state_dict(), Path(runner.log_dir) / f'scored_{runner.iter}.pt')


def run(
    work_dir: Path,
    *,
    ema: dict[str, Any] | None = EMA,
    hook: dict[str, Any] = EACH,
    scores: list[float] | None = SCORES,
    stage: int | None = None,
    **options: Any,
) -> str:
    """A run, which notes the weights that validation scores; gives its log_dir. Runs on: all ranks."""
    if scores is not None:
        hook = dict(hook, save_best='acc')
    options |= dict(hook=hook, stage=stage, ddp=stage is None, scores=scores)
    hooks = [*([] if ema is None else [ema]), dict(type='NoteScoredWeights')]
    return train(run_config(work_dir, hooks=hooks, **options)).log_dir


def live(work_dir: Path) -> list[str]:
    """With ``ema=False``, and without EMAHook. Runs on: all ranks."""
    return [run(work_dir / 'with', hook=dict(ema=False, **EACH)), run(work_dir / 'without', ema=None, scores=None)]


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('averaged')
    options: dict[str, Any] = {**DDP, 'zero2': ZERO2, 'lora': dict(model=dict(lora=True))}
    scenarios: dict[str, Any] = {name: partial(run, root / name, **how) for name, how in options.items()}
    scenarios |= {n: partial(refusal_of, partial(run, root / n, **how)) for n, (how, _) in REFUSED.items()}
    scenarios['live'] = partial(live, root / 'live')
    return run_scenarios(scenarios, 2, env=READS_OWN_CHECKPOINTS)


def log_dir_of(finished: Any, name: str) -> Path:
    return Path(check(finished, name)[0])


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / 'xhf_manifest.json').read_text())


def state_dicts(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What CheckpointHook has written of ``llm``, averaged and live."""
    content = torch.load(checkpoint, weights_only=False)
    averaged = {name.removeprefix('llm.'): tensor for name, tensor in content['state_dict'].items()}
    live = {n.removeprefix('module.llm.'): t for n, t in content['ema_state_dict'].items() if n != 'steps'}
    return averaged, live


def assert_holds(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """These very bytes, but for what is tied."""
    found = folder_tensors(folder)
    assert expected.keys() - found.keys() <= {'lm_head.weight'}
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), f'{folder}: {name}'


def n_differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
    assert one.keys() == other.keys()
    return sum(not torch.equal(one[name].to(tensor.dtype), tensor) for name, tensor in other.items())


@pytest.mark.parametrize('name', DDP)
def test_what_checkpoint_hook_writes(finished, name):
    log_dir = log_dir_of(finished, name)
    for folder, label in (('hf_model_iter_2', 'iter_2'), ('hf_model', 'iter_4')):
        averaged, live = state_dicts(log_dir.parent / f'{label}.pth')
        assert_holds(log_dir / folder, averaged)
        if (name, label) == ('begins_later', 'iter_2'):
            assert not n_differing(averaged, live)
        else:
            assert n_differing(averaged, live) > 5, 'the average is what is live: nothing is shown'
        assert manifest(log_dir / folder)['weights'] == 'averaged'


@pytest.mark.parametrize('name', [*DDP, 'zero2'])
def test_the_best_is_what_was_scored(finished, name):
    best = log_dir_of(finished, name) / 'hf_model_best'
    assert manifest(best)['weights'] == 'averaged'
    assert_holds(best, scored(best.parent, manifest(best)['iteration']))


def scored(log_dir: Path, iteration: int) -> dict[str, torch.Tensor]:
    weights = torch.load(log_dir / f'scored_{iteration}.pt')
    return {key: tensor.float() if 'zero2' in str(log_dir) else tensor for key, tensor in weights.items()}


def test_deepspeed_saves_the_average_at_each_step(finished, capsys):
    """The save of iteration 4 is of the weights that were scored then, and not the live ones of the checkpoint."""
    log_dir = log_dir_of(finished, 'zero2')
    assert_holds(log_dir / 'hf_model', scored(log_dir, 4))
    live = convert(log_dir.parent / 'iter_4.pth', log_dir / 'live', '--base', log_dir / 'hf_model')
    assert 'the run averages its weights (EMAHook), but DeepSpeed checkpoints hold' in capsys.readouterr().err
    assert manifest(live)['weights'] == 'live'
    assert n_differing(folder_tensors(log_dir / 'hf_model'), folder_tensors(live)) > 5
    assert 'weights averaged by EMAHook (ExponentialMovingAverage)' in log_of(log_dir)
    assert "DeepSpeed's checkpoints do not contain the averaged weights" in log_of(log_dir)


def test_an_adapter_is_averaged_too(finished):
    log_dir = log_dir_of(finished, 'lora')
    averaged, live = state_dicts(log_dir.parent / 'iter_4.pth')
    found = folder_tensors(log_dir / 'hf_model')
    in_training = {name.replace('.weight', '.default.weight'): tensor for name, tensor in found.items()}
    assert len(in_training) == 4 and all(torch.equal(t, averaged[name]) for name, t in in_training.items())
    assert any(not torch.equal(t, live[name]) for name, t in in_training.items())


@pytest.mark.parametrize('name', REFUSED)
def test_refused_before_training(finished, name):
    messages = check(finished, name)
    assert messages[0] == messages[1] and REFUSED[name][1] in messages[0]


@pytest.mark.parametrize('name', DDP)
def test_conversion_gives_what_the_hook_saved(finished, name, tmp_path, capsys):
    log_dir = log_dir_of(finished, name)
    hook, checkpoint = log_dir / 'hf_model', log_dir.parent / 'iter_4.pth'
    out = convert(checkpoint, tmp_path / 'out', '--base', hook, '--verify', 'full')
    assert 'the averaged weights)' in capsys.readouterr().out
    assert_same_files(out, hook)
    assert manifest(out)['weights'] == 'averaged'
    assert verify(['--compare', str(hook), str(checkpoint), '--base', str(hook)]) == 0


def test_the_live_ones_on_request(finished, tmp_path, capsys):
    """By the hook and by a conversion; averaging does not change training: they are those of a run without it."""
    averaging, plain = map(Path, check(finished, 'live')[0])
    for folder in ('hf_model', 'hf_model_iter_2'):
        assert_same_files(averaging / folder, plain / folder)
        assert manifest(averaging / folder)['weights'] == manifest(plain / folder)['weights'] == 'live'
    checkpoint, expected = averaging.parent / 'iter_4.pth', averaging / 'hf_model'
    live = convert(checkpoint, tmp_path / 'live', '--base', expected, '--no-ema')
    assert 'the live weights)' in capsys.readouterr().out
    assert_same_files(live, expected)
    assert manifest(live)['weights'] == 'live'
    averaged = convert(checkpoint, tmp_path / 'averaged', '--base', expected)
    assert n_differing(folder_tensors(averaged), folder_tensors(live))
    assert verify(['--compare', str(expected), str(checkpoint), '--base', str(expected)]) == 0, (
        'the live ones of the checkpoint'
    )
    assert 'the live ones are compared' in capsys.readouterr().out
    assert verify(['--compare', str(averaged), str(checkpoint), '--base', str(expected)]) == 0


def test_conversion_of_a_published_checkpoint(finished, tmp_path, capsys):
    """CheckpointHook's ``published_keys`` leave out ``ema_state_dict``: only the averaged weights are left."""
    log_dir = log_dir_of(finished, 'begins_later')
    content = torch.load(log_dir.parent / 'iter_4.pth', weights_only=False)
    torch.save({key: content[key] for key in ('meta', 'state_dict')}, tmp_path / 'published.pth')
    out = convert(tmp_path / 'published.pth', tmp_path / 'out', '--base', log_dir / 'hf_model')
    assert_same_files(out, log_dir / 'hf_model')
    assert manifest(out)['weights'] == 'averaged'
    live = [str(tmp_path / 'published.pth'), str(tmp_path / 'live'), '--base', str(out), '--no-ema']
    assert main(live) == BAD_INPUT
    assert 'option --no-ema: expected a checkpoint with the ema_state_dict of its run' in capsys.readouterr().err
