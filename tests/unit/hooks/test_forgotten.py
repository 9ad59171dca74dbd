"""A run of MMEngine that an exception ended, and that nobody closed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from tests.helpers.runs.toy_run import run_config, train


def test_its_model_is_not_kept_in_memory(tmp_path):
    models: list[weakref.ref[Any]] = []

    @HOOKS.register_module(force=True)
    class EndingHook(Hook):
        def after_train_iter(self, runner: Any, *others: Any, **named: Any) -> None:
            models.append(weakref.ref(runner.model))
            raise RuntimeError('training failed')

    hook = dict(interval=1, by_epoch=False, async_save=True, save_best='acc', on_saved=['echo', '{"a": 1}'])
    hook['upload_to'] = (tmp_path / 'store').as_uri()
    with pytest.raises(RuntimeError, match='training failed'):
        train(run_config(tmp_path / 'run', hook=hook, stage=None, scores=[0.5], hooks=[dict(type='EndingHook')]))
    gc.collect()
    assert [model() for model in models] == [None]
