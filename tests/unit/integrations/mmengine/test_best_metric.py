"""Which validation results are the best so far, and that this survives a resume."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import MessageHub

from xhf_hooks.errors import OptionError, TargetError
from xhf_hooks.integrations.mmengine.best import BestMetric, BestSave


@pytest.fixture
def hub(request):
    return MessageHub(f'xhf-{request.node.name}')


def best_after_each(best: BestMetric, hub: MessageHub, results: list[dict]) -> list[dict]:
    """What is better at each validation, when every save succeeds."""
    seen = []
    for metrics in results:
        better = best.improved(metrics, hub, pytest.fail)
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


def test_a_metric_whose_name_tells_no_rule_is_an_error_of_ours(hub):
    """When the hook is built, and for 'auto' at the first result."""
    with pytest.raises(OptionError, match="option rule: expected 'greater' or 'less', for the metric 'perplexity_x'"):
        BestMetric('perplexity_x', None)
    with pytest.raises(OptionError, match="expected 'greater' or 'less' for the metric 'strange', found None"):
        BestMetric('auto', None).improved({'strange': 1.0}, hub, pytest.fail)


def test_suffixes():
    assert BestMetric('coco/bbox_mAP', None).suffix('coco/bbox_mAP') == 'best'
    assert BestMetric(['coco/bbox_mAP', 'loss'], None).suffix('coco/bbox_mAP') == 'best_coco_bbox_mAP'


def test_unknown_metric(hub):
    with pytest.raises(OptionError, match=r"save_best.*\['loss', 'ppl'\].*'acc'"):
        BestMetric('acc', None).improved({'ppl': 1.0, 'loss': 2.0}, hub, pytest.fail)


def test_neither_a_save_that_failed_nor_another_hooks_is_remembered(hub):
    """The score counts when its folder is there. CheckpointHook may track the metric in this hub under its own key."""
    hub.update_info('best_score', 100.0)
    hub.update_info('best_score_acc', 100.0)
    best = BestMetric('acc', None)
    assert best.improved({'acc': 2}, hub, pytest.fail) == {'acc': 2}
    assert best.improved({'acc': 2}, hub, pytest.fail) == {'acc': 2}
    best.remember('acc', 2, hub)
    assert best.improved({'acc': 2}, hub, pytest.fail) == {}


@pytest.mark.parametrize('score', [0.5, float('inf'), torch.tensor(0.5), np.float32(0.5), 1])
def test_a_score_comes_back_from_the_manifest(score):
    """Strict JSON has no infinities."""
    manifest = json.dumps(BestMetric('acc', None).manifest_fields('acc', score), allow_nan=False).encode()
    assert BestSave.described_by(manifest, 'hf_best') == BestSave('hf_best', 'acc', float(score), None)


@pytest.mark.parametrize('text', ['', '[]', '{"best": 5}', '{"best": {"metric": "acc", "score": "nan"}}'])
def test_a_save_without_a_score_is_not_replaced_unless_the_checkpoint_has_one(text, hub):
    earlier = [BestSave.described_by(text.encode(), 'hf_best', 'best')]
    with pytest.raises(TargetError, match='hf_best has no recorded score'):
        BestMetric('acc', None).take_over_scores(Path('hf_model'), earlier, hub)
    hub.update_info('hf_checkpoint_best_score_acc', 2.5)
    assert BestMetric('acc', None).take_over_scores(Path('hf_model'), earlier, hub) == ['best acc so far: 2.5000']


def test_metrics_that_would_share_a_folder_are_refused_when_the_hook_is_built():
    with pytest.raises(OptionError, match="option save_best: expected metrics that differ in more than '/' and '_'"):
        BestMetric(['coco/bbox_mAP', 'coco_bbox_mAP'], 'greater')


@pytest.mark.parametrize(
    ('best_save', 'words'),
    [
        ({'metric': 'f1', 'score': 0.9}, "holds the best save by 'f1', and a save by 'acc' would replace it."),
        (None, 'has no recorded score to compare with.'),
    ],
)
def test_a_folder_that_auto_may_not_replace_does_not_end_the_run(best_save, words, hub):
    """The metric is known hours after training began. It is told once, and nothing is saved there."""
    best, said = BestMetric('auto', 'greater'), []
    manifest = json.dumps({} if best_save is None else {'best': best_save}).encode()
    best.take_over_scores(Path('hf_model'), [BestSave.described_by(manifest, 'hf_best', 'best')], hub)
    assert [best.improved({'acc': score}, hub, said.append) for score in (1, 2)] == [{}, {}]
    told = f'hf_best {words} Move it away, or set out_dir, for the next run'
    assert said == [f"save_best: this run makes no best saves by the metric 'acc': {told}"]
