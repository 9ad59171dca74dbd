"""Copies that are made while training goes on: of the weights of their step, whatever the engine, and never felt by it.

No copy begins here before the optimizer is about to step, or something else waits for it. So whatever an engine has
done to the weights by then, in forward and backward passes or at the beginning of its step, would be in the files.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.test_async import files_of, log_of
from tests.distributed.test_hook_runs import log_dir_of, run, saves
from tests.helpers.compare import folder_tensors
from tests.helpers.ranks import HANG_SECS
from tests.helpers.scenarios import check, run_scenarios

HOOK = dict(interval=2, by_epoch=False, max_keep_ckpts=-1)
ON_CPU = dict(device='cpu')
BATCH_NORM = dict(bf16=False, model=dict(batch_norm=True))
#: Name to options of `run`. The optimizer steps, and waits, after the saves of iterations 2 and 4.
RUNS: dict[str, dict[str, Any]] = {
    'ddp': dict(stage=None, ddp=True),
    **{f'zero{stage}': dict(stage=stage) for stage in range(4)},
    'zero1_fp32_training': dict(stage=1, bf16=False),
    'zero0_fp32_training': dict(stage=0, bf16=False),
    'zero2_offload': dict(stage=2, zero=dict(offload_optimizer=ON_CPU)),
    'zero3_offload': dict(stage=3, zero=dict(offload_optimizer=ON_CPU, offload_param=ON_CPU)),
    'zero3_stream': dict(stage=3, hook=dict(HOOK, writer='stream')),
    'zero3_lora': dict(stage=3, model=dict(lora=True)),
    'zero2_float32': dict(stage=2, hook=dict(HOOK, dtype='float32')),
    'zero3_float32': dict(stage=3, hook=dict(HOOK, dtype='float32')),
    'zero2_buffers': dict(stage=2, **BATCH_NORM),
    'zero3_buffers': dict(stage=3, **BATCH_NORM),
}
#: With steps at every third iteration only; after the save of iteration 4, two passes go by.
ACCUMULATING = {
    f'zero{stage}_accumulating': dict(stage=stage, accumulate=3, max_iters=8, hook=dict(HOOK, interval=4))
    for stage in (1, 2, 3)
}
#: Of these nothing can be deferred: only masters are saved, which are copied at once.
AT_ONCE = ('zero2_float32', 'zero3_float32')


def deferred(options: dict[str, Any], work_dir: Path) -> list[Any]:
    """A run whose copies begin when something waits for them. Runs on: all ranks.

    Returns:
        Its folder, what has waited, and how many bytes were copied while it did.
    """
    from xhf_hooks.concurrency.deferred_copies import DeferredCopies
    from xhf_hooks.manager import CheckpointManager

    run_copies, wait, collect = DeferredCopies.run, DeferredCopies.wait, CheckpointManager.collect
    awaited, waiters, nbytes = threading.Event(), [], []

    def run_when_awaited(self: DeferredCopies) -> None:
        if threading.current_thread() is not threading.main_thread():  # not the trial before training
            if self.nbytes and not awaited.wait(HANG_SECS):
                raise TimeoutError('nothing has waited for the copy')
            nbytes.append(self.nbytes)
        run_copies(self)

    def note_wait(self: DeferredCopies, *args: Any) -> None:
        if not self._none_left.is_set():
            waiters.append('step' if args else 'hook')
            awaited.set()
        wait(self, *args)
        awaited.clear()

    def note_collect(self: CheckpointManager) -> None:
        awaited.set()
        collect(self)
        awaited.clear()

    hook = {**HOOK, **options.get('hook', {}), 'async_save': True, 'defer_copy': True}
    options = {'max_iters': 5, **options, 'hook': hook}
    with (
        mock.patch.object(DeferredCopies, 'run', run_when_awaited),
        mock.patch.object(DeferredCopies, 'wait', note_wait),
        mock.patch.object(CheckpointManager, 'collect', note_collect),
    ):
        return [run(options, work_dir), waiters, nbytes]


def changed(work_dir: Path) -> list[Any]:
    """On rank 1 a hook changes a weight after the save of iteration 2. Runs on: all ranks."""
    import torch
    import torch.distributed as dist
    from mmengine.hooks import Hook
    from mmengine.registry import HOOKS

    class ChangesWeights(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if runner.iter == 2 and dist.get_rank() == 1:
                with torch.no_grad():
                    next(runner.model.parameters()).mul_(1)

    HOOKS.register_module(module=ChangesWeights, force=True)
    return deferred(dict(stage=2, hooks=[dict(type='ChangesWeights')]), work_dir)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('deferred')
    scenarios: dict[str, Any] = {}
    for name, options in {**RUNS, **ACCUMULATING}.items():
        waiting = {'max_iters': 5, 'hook': HOOK, **options}
        scenarios[f'{name}_not'] = partial(run, waiting, root / f'{name}_not')
        scenarios[name] = partial(deferred, options, root / name)
    scored = dict(stage=2, max_iters=4, scores=[0.5, 0.7], hooks=[dict(type='EMAHook', momentum=0.1)])
    live = dict(hook=dict(HOOK, ema=False))
    scenarios['live_not'] = partial(run, dict(scored, **live), root / 'live_not')
    scenarios['live'] = partial(deferred, dict(scored, **live), root / 'live')
    scenarios['averaged'] = partial(deferred, scored, root / 'averaged')
    scenarios['changed'] = partial(changed, root / 'changed')
    return root, run_scenarios(scenarios, 2)


@pytest.mark.parametrize('name', [*RUNS, *ACCUMULATING, 'live'])
def test_the_weights_are_those_of_the_step(finished, name):
    log_dir, whole = Path(check(finished[1], name)[0][0]), log_dir_of(finished, f'{name}_not')
    assert saves(log_dir) == saves(whole)
    for folder in saves(whole):
        assert files_of(log_dir / folder) == files_of(whole / folder), folder
    by_age = sorted(saves(whole), key=saves(whole).__getitem__)
    first, last = (folder_tensors(whole / folder) for folder in (by_age[0], by_age[-1]))
    assert any(not first[key].equal(last[key]) for key in first), 'training moved too little to see a late read'


@pytest.mark.parametrize('name', [*RUNS, *ACCUMULATING])
def test_the_step_waits(finished, name):
    for _, waiters, nbytes in check(finished[1], name):
        if name in AT_ONCE:
            assert waiters == [] and not any(nbytes)
        else:
            assert set(waiters) == {'step'} and len(waiters) == (1 if name in ACCUMULATING else 2)
            assert all(nbytes)


def test_validation_with_other_weights_waits(finished):
    for _, waiters, _ in check(finished[1], 'live'):
        assert waiters == ['hook', 'hook']


def test_averaged_weights_are_copied_at_once(finished):
    found = check(finished[1], 'averaged')
    assert not any(waiters or any(nbytes) for _, waiters, nbytes in found)
    assert 'defer_copy: no saved tensor can be copied later' in log_of(Path(found[0][0]))


def test_a_weight_that_changes_meanwhile_fails_the_save_alone(finished):
    log_dir = Path(check(finished[1], 'changed')[0][0])
    assert sorted(saves(log_dir).values()) == [4, 5]
    log = log_of(log_dir)
    assert 'failed and training goes on' in log and 'rank 1: TensorError: a weight was changed' in log
