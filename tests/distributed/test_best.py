"""``save_best`` over several runs: no resume, and no new run, replaces the best model by a worse one."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.compare import assert_loads_clean, assert_same_folder_tensors
from tests.helpers.scenarios import check, run_scenarios

#: MMEngine reads its own checkpoints with torch.load, which by default refuses them.
ENV = {'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD': '1'}
BEST = dict(save_best='acc')


def run(work_dir: Path, scores: list[Any], *, until: int, hook: dict[str, Any], **options: Any) -> str:
    """A run that validates every two iterations; gives its log_dir. Runs on: all ranks.

    As by default in MMEngine, the checkpoint of an iteration is written before its validation.
    """
    from tests.helpers.toy_run import run_config, train

    options = {'stage': 2, **options}
    return train(run_config(work_dir, hook=hook, max_iters=until, scores=scores, **options)).log_dir


def parts(root: Path, *scores: list[Any], hook: dict[str, Any] = BEST, **options: Any) -> list[str]:
    """A run, and resumes from its last checkpoint. Runs on: all ranks."""
    done, log_dirs = 0, []
    for part, some in enumerate(scores):
        done += 2 * len(some)
        log_dirs.append(run(root / 'work', some, until=done, hook=hook, resume=part > 0, **options))
        if 'out_dir' in hook:  # where the next part may replace it
            _on_rank0(lambda part=part: shutil.copytree(root / 'out', root / f'after_{part}'))
    return log_dirs


def fixed(root: Path, *scores: list[Any], hook: dict[str, Any] = BEST, **options: Any) -> list[str]:
    """All parts save into ``root/out``. Runs on: all ranks."""
    return parts(root, *scores, hook=dict(hook, out_dir=str(root / 'out' / 'hf_model')), **options)


def _on_rank0(action: Any) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        action()
    dist.barrier()


def another_work_dir(root: Path) -> list[str]:
    """The second part resumes what lies in another work_dir. Runs on: all ranks."""
    first = run(root / 'work', [0.8, 0.9], until=4, hook=BEST)
    there = dict(resume=True, load_from=str(root / 'work' / 'iter_4.pth'))
    second = run(root / 'elsewhere', [0.85], until=6, hook=BEST, **there)
    third = run(root / 'third', [0.95], until=8, hook=BEST, resume=True, load_from=str(root / 'elsewhere/iter_6.pth'))
    return [first, second, third]


def more_metrics(root: Path) -> list[str]:
    """The second part judges by two metrics, and names their folders otherwise. Runs on: all ranks."""
    first = run(root / 'work', [0.8, 0.9], until=4, hook=BEST)
    hook = dict(save_best=['acc', 'loss'])
    return [first, run(root / 'work', [dict(acc=0.85, loss=0.4)], until=6, hook=hook, resume=True)]


def afresh(root: Path, out_dir: bool) -> list[str]:
    """The second run is not a resume. Runs on: all ranks."""
    hook = dict(BEST, out_dir=str(root / 'out' / 'hf_model')) if out_dir else BEST
    return [run(root / 'work', scores, until=2 * len(scores), hook=hook) for scores in ([0.8, 0.9], [0.85])]


def gone(root: Path) -> list[str]:
    """The best folder, of which the checkpoint knows, is deleted before the resume. Runs on: all ranks."""
    first = run(root / 'work', [0.9, 0.8], until=4, hook=BEST)
    _on_rank0(lambda: shutil.rmtree(Path(first) / 'hf_model_best'))
    return [first, run(root / 'work', [0.85], until=6, hook=BEST, resume=True)]


def without_score(root: Path, scores: list[float]) -> list[str]:
    """The best folder is of a version of this package that wrote no scores. Runs on: all ranks."""
    hook = dict(BEST, out_dir=str(root / 'out' / 'hf_model'))
    first = run(root / 'work', scores, until=2 * len(scores), hook=hook)
    _on_rank0(lambda: _forget_score(root / 'out' / 'hf_model_best' / 'xhf_manifest.json'))
    try:
        return [first, run(root / 'work', [0.85], until=2 * len(scores) + 2, hook=hook, resume=True)]
    except Exception as error:
        return [first, f'{type(error).__name__}: {error}']


def _forget_score(manifest: Path) -> None:
    content = json.loads(manifest.read_text())
    content.pop('best', None)
    manifest.write_text(json.dumps(content))


def another_metric(root: Path) -> str:
    """The best folder is that of another metric: the message of a run that must not start. Runs on: all ranks."""
    from tests.helpers.toy_run import ToyLM
    from xhf_hooks.errors import TargetError

    out_dir = str(root / 'out' / 'hf_model')
    run(root / 'work', [0.8, 0.9], until=4, hook=dict(BEST, out_dir=out_dir))
    with (
        mock.patch.object(ToyLM, 'forward', side_effect=AssertionError('training began')),
        pytest.raises(TargetError) as caught,
    ):
        run(root / 'work', [0.1], until=6, hook=dict(save_best='loss', out_dir=out_dir), resume=True)
    # What it has taken, it has given back
    run(root / 'work', [0.95], until=6, hook=dict(BEST, out_dir=out_dir), resume=True)
    return str(caught.value)


def another_metric_by_auto(root: Path) -> list[str]:
    """That it is another metric is known at the first validation only. Runs on: all ranks."""
    hook = dict(save_best='auto', out_dir=str(root / 'out' / 'hf_model'))
    first = run(root / 'work', [0.8, 0.9], until=4, hook=hook)
    return [first, run(root / 'work', [{'loss': 0.1, 'acc': 1.0}], until=6, hook=hook, resume=True)]


#: Name to (options of `fixed`, scores of each part, and after each part the folders and the iterations they are of).
RESUMED: dict[str, tuple[dict[str, Any], list[list[Any]], list[dict[str, int]]]] = {
    'zero3': (dict(stage=3), [[0.8, 0.9], [0.85], [0.95]], [{'best': 4}, {'best': 4}, {'best': 8}]),
    'async': (dict(hook=dict(BEST, async_save=True)), [[0.8, 0.9], [0.85, 0.95]], [{'best': 4}, {'best': 8}]),
    'auto': (dict(hook=dict(save_best='auto')), [[0.8, 0.9], [0.85], [0.95]], [{'best': 4}, {'best': 4}, {'best': 8}]),
    'two_metrics': (
        dict(hook=dict(save_best=['acc', 'loss'])),
        [[dict(acc=0.8, loss=0.6), dict(acc=0.9, loss=0.5)], [dict(acc=0.85, loss=0.4)], [dict(acc=0.95, loss=0.45)]],
        [{'best_acc': 4, 'best_loss': 4}, {'best_acc': 4, 'best_loss': 6}, {'best_acc': 8, 'best_loss': 6}],
    ),
}


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('best')
    scenarios: dict[str, Any] = {
        name: partial(fixed, root / name, *scores, **options) for name, (options, scores, _) in RESUMED.items()
    }
    scenarios['timestamps'] = partial(parts, root / 'timestamps', [0.8, 0.9], [0.85], [0.95])
    scenarios['another_work_dir'] = partial(another_work_dir, root / 'another_work_dir')
    scenarios['more_metrics'] = partial(more_metrics, root / 'more_metrics')
    scenarios['afresh'] = partial(afresh, root / 'afresh', out_dir=False)
    scenarios['afresh_fixed'] = partial(afresh, root / 'afresh_fixed', out_dir=True)
    scenarios['gone'] = partial(gone, root / 'gone')
    scenarios['known_to_the_checkpoint'] = partial(without_score, root / 'known_to_the_checkpoint', [0.9, 0.8])
    scenarios['known_to_nobody'] = partial(without_score, root / 'known_to_nobody', [0.9])
    scenarios['another_metric'] = partial(another_metric, root / 'another_metric')
    scenarios['another_metric_by_auto'] = partial(another_metric_by_auto, root / 'another_metric_by_auto')
    return root, run_scenarios(scenarios, 2, env=ENV)


def best_in(parent: Path) -> dict[str, int]:
    """Suffix of each best folder there, to the iteration that it is of."""
    manifests = {path.parent.name: json.loads(path.read_text()) for path in parent.glob('hf_model_*/xhf_manifest.json')}
    return {name.removeprefix('hf_model_'): manifest['iteration'] for name, manifest in manifests.items()}


def log_of(log_dir: str | Path) -> str:
    return (Path(log_dir) / f'{Path(log_dir).name}.log').read_text()


@pytest.mark.parametrize('name', RESUMED)
def test_a_worse_one_after_a_resume_replaces_nothing(finished, name):
    from transformers import LlamaForCausalLM

    check(finished[1], name)
    _, scores, expected = RESUMED[name]
    assert [best_in(finished[0] / name / f'after_{part}') for part in range(len(scores))] == expected
    after = [finished[0] / name / f'after_{part}' for part in range(len(scores))]
    for part in range(1, len(after)):
        for suffix, iteration in expected[part].items():
            if expected[part - 1][suffix] == iteration:
                assert_same_folder_tensors(after[part] / f'hf_model_{suffix}', after[part - 1] / f'hf_model_{suffix}')
            assert_loads_clean(after[part] / f'hf_model_{suffix}', LlamaForCausalLM)


def test_manifest_says_what_it_is_the_best_of(finished):
    check(finished[1], 'two_metrics')
    found = {
        path.parent.name: json.loads(path.read_text())['best']
        for path in (finished[0] / 'two_metrics' / 'out').glob('hf_model_*/xhf_manifest.json')
    }
    assert found == {
        'hf_model_best_acc': {'metric': 'acc', 'score': 0.95, 'rule': 'greater'},
        'hf_model_best_loss': {'metric': 'loss', 'score': 0.4, 'rule': 'less'},
    }


def test_the_best_of_an_earlier_timestamp_counts(finished):
    log_dirs = list(map(Path, check(finished[1], 'timestamps')[0]))
    assert len({log_dir.parent for log_dir in log_dirs}) == 1
    assert [best_in(log_dir) for log_dir in log_dirs] == [{'best': 4}, {}, {'best': 8}]
    assert 'best acc so far: 0.9000' in log_of(log_dirs[1])


def test_the_best_of_another_work_dir_counts(finished):
    first, second, third = check(finished[1], 'another_work_dir')[0]
    assert [best_in(Path(log_dir)) for log_dir in (first, second, third)] == [{'best': 4}, {}, {'best': 8}]


def test_a_folder_of_another_name_counts_for_its_metric(finished):
    first, second = map(Path, check(finished[1], 'more_metrics')[0])
    assert best_in(first) == {'best': 4}
    assert best_in(second) == {'best_loss': 6}


def test_a_new_run_competes_where_it_would_replace(finished):
    first, second = map(Path, check(finished[1], 'afresh')[0])
    assert (best_in(first), best_in(second)) == ({'best': 4}, {'best': 2})
    check(finished[1], 'afresh_fixed')
    assert best_in(finished[0] / 'afresh_fixed' / 'out') == {'best': 4}


def test_a_score_of_which_the_folder_is_gone_counts(finished):
    first, second = map(Path, check(finished[1], 'gone')[0])
    assert (best_in(first), best_in(second)) == ({}, {})
    assert 'best acc so far: 0.9000' in log_of(second)


def test_a_folder_without_a_score(finished):
    """It is kept: by the score that the checkpoint knows, or else by not training at all."""
    check(finished[1], 'known_to_the_checkpoint')
    assert best_in(finished[0] / 'known_to_the_checkpoint' / 'out') == {'best': 2}
    (message,) = {outcome[1] for outcome in check(finished[1], 'known_to_nobody')}
    assert 'TargetError' in message and 'hf_model_best has no recorded score' in message and 'Move it away' in message
    assert best_in(finished[0] / 'known_to_nobody' / 'out') == {'best': 2}


def test_a_folder_of_another_metric_is_not_replaced(finished):
    (message,) = set(check(finished[1], 'another_metric'))
    assert (
        "hf_model_best holds the best save by 'acc', and a save by 'loss' would replace it" in message
        and 'Move it away' in message
    )
    assert best_in(finished[0] / 'another_metric' / 'out') == {'best': 6}
    _, second = check(finished[1], 'another_metric_by_auto')[0]
    assert best_in(finished[0] / 'another_metric_by_auto' / 'out') == {'best': 4}
    assert "holds the best save by 'acc', and a save by 'loss'" in log_of(second)
