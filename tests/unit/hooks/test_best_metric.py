"""Which validation results are the best so far, and that this survives a resume."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from mmengine.logging import MessageHub

from xhf_hooks.errors import OptionError, TargetError
from xhf_hooks.hooks.best import BestFolder, BestMetric, describe_best, earlier_folders, find_best_folders


@pytest.fixture
def hub(request):
    return MessageHub(f'xhf-{request.node.name}')


def best_after_each(best: BestMetric, hub: MessageHub, results: list[dict]) -> list[dict]:
    """What is better at each validation, when every save succeeds."""
    seen = []
    for metrics in results:
        better = best.improved(metrics, hub)
        for metric, score in better.items():
            best.remember(metric, score, hub)
        seen.append(better)
    return seen


@pytest.mark.parametrize(
    ('save_best', 'rule', 'scores', 'expected'),
    [
        ('acc', None, [1, 3, 2, 3, 4], [1, 3, None, None, 4]),
        ('loss', None, [3, 1, 2, 1, 0], [3, 1, None, None, 0]),
        ('acc', 'less', [3, 1, 2], [3, 1, None]),
        ('anything', 'greater', [-5, -7, -2], [-5, None, -2]),
        ('val/total_Loss', None, [3, 4, 2], [3, None, 2]),
        ('acc', None, [1, float('nan'), 2], [1, None, 2]),
        ('acc', None, [None, 1], [None, 1]),
        ('acc', None, [0, 0], [0, None]),
    ],
)
def test_rules(save_best, rule, scores, expected, hub):
    seen = best_after_each(BestMetric(save_best, rule), hub, [{save_best: score, 'other': 9} for score in scores])
    assert [better.get(save_best) for better in seen] == expected
    assert all(set(better) <= {save_best} for better in seen)


def test_auto_is_the_first_result(hub):
    best = BestMetric('auto', None)
    results = [{'loss': 2.0, 'acc': 1}, {'loss': 3.0, 'acc': 5}, {'acc': 9, 'loss': 1.0}]
    assert best_after_each(best, hub, results) == [{'loss': 2.0}, {}, {'loss': 1.0}]


def test_auto_without_a_rule_for_the_first_result_is_an_error_of_ours(hub):
    with pytest.raises(OptionError, match='rule'):
        BestMetric('auto', None).improved({'strange': 1.0}, hub)


def test_auto_with_a_rule(hub):
    best = BestMetric('auto', 'less')
    assert best_after_each(best, hub, [{'strange': 2}, {'strange': 3}, {'strange': 1}]) == [
        {'strange': 2},
        {},
        {'strange': 1},
    ]


def test_several_metrics_are_judged_apart(hub):
    best = BestMetric(['acc', 'loss'], ['greater', 'less'])
    results = [{'acc': 1, 'loss': 5}, {'acc': 2, 'loss': 6}, {'acc': 1, 'loss': 4}, {'acc': 0, 'loss': 9}]
    assert best_after_each(best, hub, results) == [{'acc': 1, 'loss': 5}, {'acc': 2}, {'loss': 4}, {}]


def test_folder_suffixes():
    assert BestMetric('coco/bbox_mAP', None).folder_suffix('coco/bbox_mAP') == 'best'
    several = BestMetric(['coco/bbox_mAP', 'loss'], None)
    assert several.folder_suffix('coco/bbox_mAP') == 'best_coco_bbox_mAP'
    assert several.folder_suffix('loss') == 'best_loss'


def test_unknown_metric(hub):
    with pytest.raises(OptionError, match=r"save_best.*\['loss', 'ppl'\].*'acc'"):
        BestMetric('acc', None).improved({'ppl': 1.0, 'loss': 2.0}, hub)


def test_a_save_that_failed_is_not_remembered(hub):
    """The score counts when its folder is there; until then the same score is still better."""
    best = BestMetric('acc', None)
    assert best.improved({'acc': 2}, hub) == {'acc': 2}
    assert best.improved({'acc': 2}, hub) == {'acc': 2}
    best.remember('acc', 2, hub)
    assert best.improved({'acc': 2}, hub) == {}


@pytest.mark.parametrize('score', [3.5, torch.tensor(3.5)], ids=['float', 'tensor'])
def test_resume(score, hub, tmp_path):
    """Through what MMEngine's checkpoints carry: Runner.save_checkpoint pickles hub.state_dict()."""
    best = BestMetric(['acc', 'loss'], None)
    best_after_each(best, hub, [{'acc': score, 'loss': 1.0}])
    state = pickle.loads(pickle.dumps(hub.state_dict()))

    resumed_hub = MessageHub('xhf-resumed')
    resumed_hub.load_state_dict(state)
    resumed = BestMetric(['acc', 'loss'], None)
    results = [{'acc': 3.0, 'loss': 2.0}, {'acc': 4.0, 'loss': 0.5}]
    assert best_after_each(resumed, resumed_hub, results) == [{}, {'acc': 4.0, 'loss': 0.5}]


def test_scores_of_the_checkpoint_hook_are_another_matter(hub):
    """CheckpointHook may track the same metric in the same hub under its own key."""
    hub.update_info('best_score', 100.0)
    hub.update_info('best_score_acc', 100.0)
    assert BestMetric('acc', None).improved({'acc': 1.0}, hub) == {'acc': 1.0}


@pytest.mark.parametrize('score', [0.5, float('inf'), -float('inf'), torch.tensor(0.5), np.float32(0.5), 1])
def test_a_score_comes_back_from_the_manifest(score, tmp_path):
    """Strict JSON has no infinities."""
    folder = tmp_path / 'hf[1]_best'
    folder.mkdir()
    manifest = {'iteration': 4, **describe_best('acc', score, 'greater')}
    (folder / 'xhf_manifest.json').write_text(json.dumps(manifest, allow_nan=False))
    assert find_best_folders([tmp_path / 'hf[1]']) == [BestFolder(folder, 'acc', float(score), 4)]


@pytest.mark.parametrize(
    'text', ['', '[]', '{}', '{"iteration": 4, "best": 5}', '{"iteration": 4, "best": {"metric": "acc"}}', '[' * 10**5]
)
def test_what_is_no_manifest_of_ours_is_no_best_folder(text, tmp_path):
    (tmp_path / 'hf_best').mkdir()
    (tmp_path / 'hf_best' / 'xhf_manifest.json').write_text(text)
    assert find_best_folders([tmp_path / 'hf', tmp_path / 'gone' / 'hf']) == []


def test_a_score_that_is_no_number_is_not_known(hub, tmp_path):
    (tmp_path / 'hf_best').mkdir()
    (tmp_path / 'hf_best' / 'xhf_manifest.json').write_text(
        '{"iteration": 4, "best": {"metric": "acc", "score": "nan"}}'
    )
    (found,) = find_best_folders([tmp_path / 'hf'])
    assert found.metric is None
    with pytest.raises(TargetError, match='has no recorded score'):
        BestMetric('acc', None).begin(tmp_path / 'hf', [found], hub)


def test_the_better_of_folders_and_hub_is_to_be_beaten(hub, tmp_path):
    known = [BestFolder(tmp_path / f'{n}_best', 'acc', score, 4) for n, score in (('a', 2.0), ('b', 3.0), ('c', 1.0))]
    hub.update_info('hf_checkpoint_best_score_acc', 2.5)
    best = BestMetric('acc', None)
    assert best.begin(tmp_path / 'hf', known, hub) == [
        f'best acc so far: 3.0000, in {tmp_path / "b_best"} (iteration 4)'
    ]
    assert best.improved({'acc': 2.7}, hub) == {}
    assert best.improved({'acc': 3.1}, hub) == {'acc': 3.1}


def test_folders_of_a_run_are_known_to_those_that_go_on_from_it(hub, tmp_path):
    for name in ('one', 'two', 'two'):
        BestMetric('acc', None).begin(tmp_path / name, [], hub)
    assert earlier_folders(hub) == [tmp_path / 'one', tmp_path / 'two']
