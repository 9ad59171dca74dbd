"""``save_best`` over several runs: no resume, and no new run, replaces the best model by a worse one."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODELS
from mmengine.structures import BaseDataElement
from transformers import LlamaForCausalLM

from tests.helpers.checks.compare import assert_loads_clean, assert_same_folder_tensors
from tests.helpers.ranks.scenarios import check, error_of, run_scenarios
from tests.helpers.runs.hook_runs import READS_OWN_CHECKPOINTS, log_of, refusal_of, run, saves
from tests.helpers.runs.toy_run import ToyLM, run_config, train

BEST = dict(save_best='acc')
#: Name to (options of a run, scores of each part, and after each part the folders and the iterations they are of).
RESUMED: dict[str, tuple[dict[str, Any], list[list[Any]], list[dict[str, int]]]] = {
    'zero3': (dict(stage=3, hook=BEST), [[0.8, 0.9], [0.85]], [{'best': 4}, {'best': 4}]),
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


#: MMEngine's validation loss on each rank, not reduced over them. That of rank 0 improves in the first and the last.
VAL_LOSSES = ((3.0, 4.0, 1.0), (3.0, 2.0, 5.0))


def ranks_disagree(work_dir: Path) -> tuple[str, float]:
    """Under DDP, by MMEngine's own validation loss; log_dir and best score. Runs on: all ranks."""

    class Scored(ToyLM):
        n_batches = 0

        def forward(self, input_ids: torch.Tensor, mode: str = 'loss') -> Any:
            if mode == 'loss':
                return super().forward(input_ids)
            score = VAL_LOSSES[dist.get_rank()][self.n_batches // 4]
            self.n_batches += 1
            return [BaseDataElement(loss={'loss': torch.tensor(score)})]

    MODELS.register_module(name='ScoredInDdp', module=lambda: MMDistributedDataParallel(Scored()))
    config = run_config(work_dir, hook=dict(save_best='val_loss'), stage=None, max_iters=6, scores=[{}, {}, {}])
    runner = train(config | dict(model=dict(type='ScoredInDdp')))
    return runner.log_dir, runner.message_hub.get_info('hf_checkpoint_best_score_val_loss')


def unknown_metric(root: Path) -> tuple[str, str]:
    """At the first validation; and one that a later validation lacks: that run's log_dir. Runs on: all ranks."""
    first = error_of(scored, root / 'first', [0.8, 0.9], 4, hook=dict(save_best='nonsense', rule='less'))
    return first, scored(root / 'later', [0.8, dict(loss=1.0), 0.9, float('nan')], 8)


def no_score_ever(work_dir: Path) -> str:
    return scored(work_dir, [float('nan'), {}], 4, hook=dict(save_best='acc', interval=-1, save_last=False))


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('best')
    scenarios: dict[str, Any] = {
        name: partial(resumed, root / name, options, scores) for name, (options, scores, _) in RESUMED.items()
    }
    scenarios |= {'elsewhere': partial(elsewhere, root), 'another_metric': partial(another_metric, root / 'metric')}
    scenarios |= {
        one.__name__: partial(one, root / one.__name__) for one in (ranks_disagree, unknown_metric, no_score_ever)
    }
    return run_scenarios(scenarios, 2, env=READS_OWN_CHECKPOINTS, root=root)


def best_in(parent: Path) -> dict[str, int]:
    """Suffix of each best folder there, to the iteration that it is of."""
    return {name.removeprefix('hf_model_'): at for name, at in saves(parent).items() if 'best' in name}


@pytest.mark.parametrize('name', RESUMED)
def test_a_worse_one_after_a_resume_replaces_nothing(finished, name):
    check(finished, name)
    expected = RESUMED[name][2]
    after = [finished.root / name / f'after_{part}' for part in range(len(expected))]
    assert [best_in(folder) for folder in after] == expected
    for part in range(1, len(after)):
        for suffix, iteration in expected[part].items():
            if expected[part - 1][suffix] == iteration:
                assert_same_folder_tensors(after[part] / f'hf_model_{suffix}', after[part - 1] / f'hf_model_{suffix}')
            assert_loads_clean(after[part] / f'hf_model_{suffix}', LlamaForCausalLM)


def test_manifest_says_what_it_is_the_best_of(finished):
    check(finished, 'two_metrics')
    manifests = (finished.root / 'two_metrics' / 'out').glob('hf_model_*/xhf_manifest.json')
    assert {path.parent.name: json.loads(path.read_text())['best'] for path in manifests} == {
        'hf_model_best_acc': {'metric': 'acc', 'score': 0.95, 'rule': 'greater'},
        'hf_model_best_loss': {'metric': 'loss', 'score': 0.4, 'rule': 'less'},
    }


def test_the_best_of_earlier_timestamps_and_work_dirs_counts(finished):
    log_dirs = list(map(Path, check(finished, 'elsewhere')[0]))
    assert [best_in(log_dir) for log_dir in log_dirs] == [{'best': 4}, {}, {'best': 10}]
    assert all('best acc so far: 0.9000' in log_of(log_dir) for log_dir in log_dirs[1:])


def test_a_folder_of_another_metric_or_run_is_not_replaced_by_a_worse_model(finished):
    (message,) = set(check(finished, 'another_metric'))
    assert "hf_model_best holds the best save by 'acc', and a save by 'loss' would replace it" in message
    assert best_in(finished.root / 'metric' / 'out') == {'best': 4}


def test_rank_0_decides_where_ranks_have_different_scores(finished):
    (log_dir, best), other = check(finished, 'ranks_disagree')
    assert other == (log_dir, best) and best == min(VAL_LOSSES[0])
    assert best_in(Path(log_dir)) == {'best': 6}
    assert re.findall(r'saved (\w+) to hf_model_best', log_of(log_dir)) == ['iter_2', 'iter_6']


def test_an_unknown_metric_is_an_error_at_the_first_validation(finished):
    """As in CheckpointHook. In a later one it is a save that failed, which ends no run."""
    (message, log_dir), *others = check(finished, 'unknown_metric')
    assert others == [(message, log_dir)]
    assert "option save_best: expected one of the validation results ['acc'], found 'nonsense'" in message
    assert best_in(Path(log_dir)) == {'best': 6}
    assert len(re.findall(r'ERROR.*comparing scores failed and training goes on', log_of(log_dir))) == 1


def test_a_run_that_has_saved_nothing_says_so(finished):
    log = log_of(check(finished, 'no_score_ever')[0])
    assert 'WARNING - HFCheckpointHook: save_best: this validation has no results' in log
    assert 'WARNING - HFCheckpointHook: training has ended, and this run has saved nothing' in log
