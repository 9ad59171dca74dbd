"""A run that was interrupted, and the next one in the same process: it ends what was there, and works."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers import frontends as doors
from tests.helpers.assert_intact import assert_whole
from tests.helpers.scenarios import check, run_scenarios
from tests.helpers.zoo.llamas import odd_llama

WRITE_SECS = 0.02
INTERRUPTED_AT, LAST = 3, 4
EVERY_STEP = dict(async_save=True, save_strategy='steps', save_steps=1)


@contextmanager
def slow_disk() -> Iterator[None]:
    """A save in the background is in flight for some iterations."""
    from xhf_hooks.writers.output_file import OutputFile

    write = OutputFile.write

    def write_slowly(self: OutputFile, *args: Any) -> None:
        time.sleep(WRITE_SECS)
        write(self, *args)

    with mock.patch.object(OutputFile, 'write', write_slowly):
        yield


def groups() -> int:
    """How many process groups this process has, with the one that calls of ``save_hf`` share. Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks.collective import Collective

    Collective.shared()
    return len(dist.distributed_c10d._world.pg_map)


def make_trainer(
    root: Path, interrupt: list[BaseException], options: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    """A Trainer with the callback, that saves at each step; ``interrupt`` is raised, each once, at step 3."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from xhf_hooks.integrations.transformers import HFCheckpointCallback

    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if interrupt and state.global_step == INTERRUPTED_AT:
                raise interrupt.pop(0)

    torch.manual_seed(0)
    return Trainer(
        model=odd_llama(),
        args=TrainingArguments(
            output_dir=str(root),
            use_cpu=True,
            ddp_backend='gloo',
            report_to=[],
            disable_tqdm=True,
            save_strategy='no',
            **{'max_steps': LAST, 'per_device_train_batch_size': 1, **arguments},
        ),
        train_dataset=doors.Sequences(),
        callbacks=[HFCheckpointCallback(**(options or EVERY_STEP)), Interrupt()],
    )


def trainer_again(root: Path) -> list[Any]:
    """The same Trainer after an exception, and a new one after Ctrl-C, as in a notebook. Runs on: all ranks."""
    before = groups()
    told: list[Any] = []
    interrupt = [RuntimeError('training failed'), KeyboardInterrupt()]
    with doors.fresh_accelerate(), slow_disk():
        first = make_trainer(root, interrupt)
        for _ in range(2):
            try:
                first.train()
            except (RuntimeError, KeyboardInterrupt) as error:
                told.append(type(error).__name__)
        second = make_trainer(root, interrupt)
        second.train()
    return [*told, assert_whole(root / 'hf_model'), groups() == before]


def never_due(root: Path) -> list[Any]:
    """The callback saves every 500 steps of 4, with the last one and without. Runs on: all ranks."""
    from xhf_hooks.errors import OptionError

    told: list[Any] = []
    with doors.fresh_accelerate():
        for save_last in (True, False):
            options = dict(save_strategy='steps', save_steps=500, save_last=save_last)
            try:
                with warnings_logged() as logged:
                    make_trainer(root, [], options).train()
            except OptionError as error:
                told.append(str(error))
            else:
                told.append([text for text in logged if 'save_steps' in text])
    return [*told, assert_whole(root / 'hf_model')]


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """What the package warns of, without the name of what speaks."""
    logged: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage().partition(': ')[2])

    logger, listener = logging.getLogger('xhf_hooks'), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield logged
    finally:
        logger.removeHandler(listener)


def runner_again(root: Path) -> list[Any]:
    """A second run of the same config, and the second run of one runner. Runs on: all ranks."""
    before = groups()
    from mmengine.hooks import Hook
    from mmengine.registry import HOOKS

    from tests.helpers.toy_run import run_config, train

    interrupt = [RuntimeError('training failed')]

    @HOOKS.register_module(force=True)
    class InterruptingHook(Hook):
        def after_train_iter(self, runner: Any, *others: Any, **more: Any) -> None:
            if interrupt and runner.iter + 1 == INTERRUPTED_AT:
                raise interrupt.pop()

    hook = dict(out_dir=str(root / 'hf_model'), async_save=True, interval=2, by_epoch=False, on_error='raise')
    config = run_config(root / 'run', hook=hook, stage=None, ddp=True, max_iters=LAST)
    config['custom_hooks'].append(dict(type='InterruptingHook'))
    told: list[Any] = []
    with slow_disk():
        try:
            train(config)
        except RuntimeError as error:
            told.append(str(error))
        runner = train(dict(config, experiment_name='second'))
        told.append(assert_whole(root / 'hf_model'))
        interrupt.append(RuntimeError('training failed'))
        runner.train_loop._iter = 0
        try:
            runner.train()
        except RuntimeError as error:
            told.append(str(error))
        runner.train()
    return [*told, assert_whole(root / 'hf_model'), groups() == before]


def two_hooks(root: Path) -> str:
    """Two hooks of one run with one folder. Runs on: all ranks."""
    from tests.helpers.toy_run import run_config, train
    from xhf_hooks.errors import XhfError

    hook = dict(out_dir=str(root / 'hf_model'), interval=2, by_epoch=False)
    config = run_config(root / 'run', hook=hook, stage=None, ddp=True, max_iters=LAST)
    config['custom_hooks'].append(dict(type='HFCheckpointHook', **hook))
    try:
        train(config)
    except XhfError as error:
        return str(error)
    return 'nothing was wrong'


def call_again(root: Path) -> list[Any]:
    """``save_hf`` after a failed preflight, and after Ctrl-C at several points. Runs on: all ranks."""
    before = groups()
    import torch.distributed as dist

    from xhf_hooks import save_hf
    from xhf_hooks.errors import XhfError
    from xhf_hooks.save import Saver
    from xhf_hooks.writers.writer import Writer

    folder, model, told = root / 'hf_model', odd_llama(), []
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (folder / 'thesis.tex').write_text('mine')
    dist.barrier()
    try:
        save_hf(model, folder)
    except XhfError as error:
        told.append('files that this package did not write' in str(error))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / 'thesis.tex').unlink()
    dist.barrier()
    for owner, name in ((Saver, '__init__'), (Saver, 'prepare'), (Saver, 'save'), (Writer, 'finish')):
        with mock.patch.object(owner, name, side_effect=KeyboardInterrupt):
            try:
                save_hf(model, folder)
            except KeyboardInterrupt:
                told.append(name)
        dist.barrier()
    committed = save_hf(model, folder, step=7)
    return [*told, assert_whole(committed.path), groups() == before]


SCENARIOS = {
    'trainer_again': trainer_again,
    'runner_again': runner_again,
    'two_hooks': two_hooks,
    'call_again': call_again,
    'never_due': never_due,
}


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('again')
    scenarios = {name: partial(scenario, root / name) for name, scenario in SCENARIOS.items()}
    return run_scenarios(scenarios, 2)


def test_trainer_again(results):
    for told in check(results, 'trainer_again'):
        assert told == ['RuntimeError', 'KeyboardInterrupt', LAST, True]


def test_steps_that_never_come_are_told_before_training(results):
    warned, refused, saved = check(results, 'never_due')[0]
    assert len(warned) == 1 and 'training ends after 4 steps, before 500' in warned[0]
    assert 'option save_strategy: expected ' in refused
    assert saved == LAST


def test_runner_again(results):
    for told in check(results, 'runner_again'):
        assert told == ['training failed', LAST, 'training failed', LAST, True]


def test_two_hooks_with_one_folder_are_refused(results):
    for told in check(results, 'two_hooks'):
        assert 'is in use by another run of this process' in told


def test_save_hf_again(results):
    for told in check(results, 'call_again'):
        assert told == [True, '__init__', 'prepare', 'save', 'finish', 7, True]
