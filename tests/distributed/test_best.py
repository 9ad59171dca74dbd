"""``save_best`` over several runs: no resume, and no new run, replaces the best model by a worse one."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_hook_runs import READS_OWN_CHECKPOINTS, log_of, refusal_of, run, saves
from tests.helpers.compare import assert_loads_clean, assert_same_folder_tensors
from tests.helpers.scenarios import check, run_scenarios

BEST = dict(save_best='acc')
#: Name to (options of a run, scores of each part, and after each part the folders and the iterations they are of).
RESUMED: dict[str, tuple[dict[str, Any], list[list[Any]], list[dict[str, int]]]] = {
    'zero3': (dict(stage=3, hook=BEST), [[0.8, 0.9], [0.85], [0.95]], [{'best': 4}, {'best': 4}, {'best': 8}]),
    'two_metrics': (
        dict(hook=dict(save_best=['acc', 'loss'], async_save=True)),
        [[dict(acc=0.8, loss=0.6), dict(acc=0.9, loss=0.5)], [dict(acc=0.85, loss=0.4)], [dict(acc=0.95, loss=0.45)]],
        [{'best_acc': 4, 'best_loss': 4}, {'best_acc': 4, 'best_loss': 6}, {'best_acc': 8, 'best_loss': 6}],
    ),
}


def scored(work_dir: Path, scores: list[Any], until: int, **options: Any) -> str:
    """A run that validates every two iterations; gives its log_dir. Runs on: all ranks.

    As by default in MMEngine, the checkpoint of an iteration is written before its validation.
    """
    how = dict(hook=BEST, stage=None, ddp='stage' not in options, max_iters=until, scores=scores)
    return run(how | options, work_dir)


def resumed(root: Path, options: dict[str, Any], scores: list[list[Any]]) -> None:
    """A run and resumes from its last checkpoint, all of which save to ``root/out``. Runs on: all ranks."""
    import torch.distributed as dist

    hook, done = dict(options['hook'], out_dir=str(root / 'out' / 'hf_model')), 0
    for part, some in enumerate(scores):
        done += 2 * len(some)
        scored(root / 'work', some, done, **{**options, 'hook': hook}, resume=part > 0)
        if dist.get_rank() == 0:
            shutil.copytree(root / 'out', root / f'after_{part}')
        dist.barrier()


def elsewhere(root: Path) -> list[str]:
    """A run, its resume, and one that resumes it in another work_dir. Runs on: all ranks."""
    first = scored(root / 'work', [0.8, 0.9], 4)
    second = scored(root / 'work', [0.85], 6, resume=True)
    there = dict(resume=True, load_from=str(root / 'work' / 'iter_6.pth'))
    return [first, second, scored(root / 'elsewhere', [0.88, 0.95], 10, **there)]


def another_metric(root: Path) -> str:
    """The best folder is that of another metric: the message of a run that must not start. Runs on: all ranks."""
    hook = dict(BEST, out_dir=str(root / 'out' / 'hf_model'))
    scored(root / 'work', [0.8, 0.9], 4, hook=hook)
    message = refusal_of(partial(scored, root / 'work', [0.1], 6, hook=dict(hook, save_best='loss'), resume=True))
    # What it has taken, it has given back; a run that resumes nothing competes with what it would replace
    scored(root / 'afresh', [0.85], 2, hook=hook)
    return message


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('best')
    scenarios: dict[str, Any] = {
        name: partial(resumed, root / name, options, scores) for name, (options, scores, _) in RESUMED.items()
    }
    scenarios |= {'elsewhere': partial(elsewhere, root), 'another_metric': partial(another_metric, root / 'metric')}
    return root, run_scenarios(scenarios, 2, env=READS_OWN_CHECKPOINTS)


def best_in(parent: Path) -> dict[str, int]:
    """Suffix of each best folder there, to the iteration that it is of."""
    return {name.removeprefix('hf_model_'): at for name, at in saves(parent).items() if 'best' in name}


@pytest.mark.parametrize('name', RESUMED)
def test_a_worse_one_after_a_resume_replaces_nothing(finished, name):
    from transformers import LlamaForCausalLM

    check(finished[1], name)
    expected = RESUMED[name][2]
    after = [finished[0] / name / f'after_{part}' for part in range(len(expected))]
    assert [best_in(folder) for folder in after] == expected
    for part in range(1, len(after)):
        for suffix, iteration in expected[part].items():
            if expected[part - 1][suffix] == iteration:
                assert_same_folder_tensors(after[part] / f'hf_model_{suffix}', after[part - 1] / f'hf_model_{suffix}')
            assert_loads_clean(after[part] / f'hf_model_{suffix}', LlamaForCausalLM)


def test_manifest_says_what_it_is_the_best_of(finished):
    check(finished[1], 'two_metrics')
    manifests = (finished[0] / 'two_metrics' / 'out').glob('hf_model_*/xhf_manifest.json')
    assert {path.parent.name: json.loads(path.read_text())['best'] for path in manifests} == {
        'hf_model_best_acc': {'metric': 'acc', 'score': 0.95, 'rule': 'greater'},
        'hf_model_best_loss': {'metric': 'loss', 'score': 0.4, 'rule': 'less'},
    }


def test_the_best_of_earlier_timestamps_and_work_dirs_counts(finished):
    log_dirs = list(map(Path, check(finished[1], 'elsewhere')[0]))
    assert [best_in(log_dir) for log_dir in log_dirs] == [{'best': 4}, {}, {'best': 10}]
    assert all('best acc so far: 0.9000' in log_of(log_dir) for log_dir in log_dirs[1:])


def test_a_folder_of_another_metric_or_run_is_not_replaced_by_a_worse_model(finished):
    (message,) = set(check(finished[1], 'another_metric'))
    assert "hf_model_best holds the best save by 'acc', and a save by 'loss' would replace it" in message
    assert best_in(finished[0] / 'metric' / 'out') == {'best': 4}
