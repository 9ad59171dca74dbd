"""What comes after an interruption, in the same process, ends what was there and works; what stays is kept."""

import gc
import time
import weakref
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from transformers import TrainerCallback

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.converted import assert_same_files
from tests.helpers.faults.slow_disk import held_disk, slow_disk
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.ranks.launch import start_process
from tests.helpers.ranks.scenarios import check, error_of, run_scenarios
from tests.helpers.runs import frontends as doors
from tests.helpers.runs.engines import train_one_step, zero_engine
from tests.helpers.runs.toy_run import run_config, train
from xhf_hooks import save_hf
from xhf_hooks.files.writer import Writer
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs import save_context
from xhf_hooks.runs.save import Save
from xhf_hooks.runs.save_context import SaveContext

INTERRUPTED_AT, LAST = 3, 4


def groups() -> int:
    """How many process groups this process has, with those that calls of ``save_hf`` share. Runs on: all ranks."""
    for use in ('saves', 'background'):
        Collective.shared(use)
    return len(dist.distributed_c10d._world.pg_map)


def raised_by(action: Any, kept: list[BaseException] | None = None) -> str:
    """What it raised, which ``kept`` keeps, as a notebook does (``sys.last_value``)."""
    try:
        action()
    except BaseException as error:
        if kept is not None:
            kept.append(error)
        return f'{type(error).__name__}: {error}'
    return 'no error'


@HOOKS.register_module()
class Interrupt(Hook):
    """In MMEngine's runs and Trainer's: raises the next of the errors at an iteration, while there are any.

    Attributes:
        models: Those that were trained then.
    """

    errors: ClassVar[list[BaseException]] = []
    models: ClassVar[list[weakref.ref[Any]]] = []

    def after_train_iter(self, runner: Any, *others: Any, **more: Any) -> None:
        if self.errors and runner.iter + 1 == INTERRUPTED_AT:
            self.models.append(weakref.ref(runner.model))
            raise self.errors.pop(0)


class InterruptTrainer(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if Interrupt.errors and state.global_step == INTERRUPTED_AT:
            raise Interrupt.errors.pop(0)


def trainer_again(root: Path) -> list[Any]:
    """The same Trainer after an exception, and a new one after Ctrl-C, as in a notebook. Runs on: all ranks."""
    before, Interrupt.errors = groups(), [RuntimeError('training failed'), KeyboardInterrupt()]
    options = dict(async_save=True, save_strategy='steps', save_steps=1)
    with doors.fresh_accelerate(), slow_disk():
        first = doors.make_trainer(root, options, InterruptTrainer())
        told = [raised_by(first.train), raised_by(first.train)]
        doors.make_trainer(root, options, InterruptTrainer()).train()
        never = dict(save_strategy='steps', save_steps=500, save_last=False)
        told.append(raised_by(doors.make_trainer(root / 'never', never).train))
    return [*told, assert_whole(root / 'hf_model'), groups() == before]


def runner_again(root: Path) -> list[Any]:
    """A second run of the same config, and the second run of one runner. Runs on: all ranks."""
    before, Interrupt.errors = groups(), [RuntimeError('training failed')]
    hook = dict(out_dir=str(root / 'hf_model'), async_save=True, interval=2, by_epoch=False, on_error='raise')
    how: dict[str, Any] = dict(hook=hook, stage=None, ddp=True, max_iters=LAST)
    config = run_config(root / 'run', hooks=[dict(type='Interrupt')], **how)
    with slow_disk():
        in_notebook: list[BaseException] = []  # else the garbage collector may end the first run before the second
        told: list[Any] = [raised_by(lambda: train(config), in_notebook)]
        runner = train(dict(config, experiment_name='second'))
        told.append(assert_whole(root / 'hf_model'))
        Interrupt.errors = [RuntimeError('training failed')]
        runner.train_loop._iter = 0
        told.append(raised_by(runner.train))
        runner.train()
    return [*told, assert_whole(root / 'hf_model'), groups() == before]


def call_again(root: Path) -> list[Any]:
    """``save_hf`` after a failed preflight, and after Ctrl-C at several points. Runs on: all ranks."""
    before = groups()

    def interrupt_all(*args: Any, **options: Any) -> None:
        dist.barrier()  # no rank finds the others gone before it is interrupted itself
        raise KeyboardInterrupt

    folder, model = root / 'hf_model', odd_llama()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (folder / 'thesis.tex').write_text('mine')
    dist.barrier()
    told = ['files that this package did not write' in error_of(save_hf, model, folder)]
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / 'thesis.tex').unlink()
    dist.barrier()
    for owner, name in ((SaveContext, 'open'), (save_context, 'prepare_saves'), (Save, 'begin'), (Writer, 'finish')):
        with mock.patch.object(owner, name, side_effect=interrupt_all):
            told.append('KeyboardInterrupt' in raised_by(lambda: save_hf(model, folder)))
        dist.barrier()
    committed = save_hf(model, folder, step=7)
    return [*told, assert_whole(committed.path), groups() == before]


def handle_again(root: Path) -> list[Any]:
    """``save_hf`` in the background: a save, one that fails on rank 1, and one. Runs on: all ranks."""
    model, folder = zero_engine(odd_llama(bf16=True), 3), root / 'hf_model'
    before = groups()
    save_hf(model, root / 'expected', step=1)
    with held_disk() as may_write:
        handle = save_hf(model, folder, step=1, async_save=True)
        train_one_step(model)
        goes_on = not handle.done()
        may_write.set()
        committed = handle.result()
    told: list[Any] = [goes_on, committed.step.iteration, str(committed.path), committed.cost.nbytes]
    told.append(0 < committed.cost.stalled_secs < committed.cost.seconds)
    broken = mock.Mock(side_effect=OSError(5, 'injected'))
    with mock.patch.object(Writer, 'finish', broken if dist.get_rank() == 1 else Writer.finish):
        handle = save_hf(model, folder, step=2, async_save=True)
        told.append(error_of(handle.result))
    told.append(save_hf(model, root / 'after', step=3, async_save=True).result().step.iteration)
    with mock.patch.object(Save, 'copy_and_continue', side_effect=KeyboardInterrupt):
        told.append(raised_by(lambda: save_hf(model, root / 'after', step=4, async_save=True)))
    dist.barrier()
    told.append(save_hf(model, root / 'after', step=5, async_save=True).result().step.iteration)
    model.destroy()
    return [*told, groups() - before]


def never_closed(root: Path) -> list[bool]:
    """Whether the model of a run that raised is still in memory, with all that works beside it. Runs on: all ranks."""
    Interrupt.errors, Interrupt.models = [RuntimeError('training failed')], []
    hook = dict(interval=1, by_epoch=False, async_save=True, save_best='acc', on_saved=['echo', '{"a": 1}'])
    hook['upload_to'] = (root / 'store').as_uri()
    how: dict[str, Any] = dict(hook=hook, stage=None, ddp=True, scores=[0.5], hooks=[dict(type='Interrupt')])
    raised_by(lambda: train(run_config(root / 'run', **how)))
    deadline = time.monotonic() + 60
    while any(model() is not None for model in Interrupt.models) and time.monotonic() < deadline:
        time.sleep(0.1)  # a save may be in flight
        gc.collect()
    return [model() is not None for model in Interrupt.models]


SCENARIOS = {
    'handle': handle_again,  # before runs that close their process groups in a thread
    'trainer': trainer_again,
    'runner': runner_again,
    'call': call_again,
    'never_closed': never_closed,
}


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('again')
    return run_scenarios({name: partial(scenario, root / name) for name, scenario in SCENARIOS.items()}, 2, root=root)


def test_trainer_again(results):
    for failed, interrupted, never, *rest in check(results, 'trainer'):
        assert (failed, interrupted) == ('RuntimeError: training failed', 'KeyboardInterrupt: ')
        assert 'option save_strategy: expected ' in never
        assert rest == [LAST, True]


def test_runner_again(results):
    failed = 'RuntimeError: training failed'
    assert check(results, 'runner') == [[failed, LAST, failed, LAST, True]] * 2


def test_save_hf_again(results):
    assert check(results, 'call') == [[True] * 5 + [7, True]] * 2


def test_the_handle_of_a_save_has_the_same_outcome_on_all_ranks(results):
    """Training has changed the weights before they were written. All such saves share a process group."""
    folder = results.folder('handle')
    assert_same_files(folder / 'hf_model', folder / 'expected')
    one, other = check(results, 'handle')
    assert one == other
    goes_on, step, path, nbytes, is_short, error, after, interrupted, last, n_more_groups = one
    assert goes_on and is_short and nbytes > 0
    assert (step, path, after, last) == (1, str(folder / 'hf_model'), 3, 5)
    assert error.startswith('AgreedError') and 'failed on rank 1: OSError' in error
    assert interrupted == 'KeyboardInterrupt: ' and n_more_groups == 0


def test_the_model_of_a_run_that_was_never_closed_is_not_kept_in_memory(results):
    assert check(results, 'never_closed') == [[False]] * 2


def save_twice_and_again(folder: Path, test: Connection) -> None:
    """Between the second save and the third, the test saves there. Runs on: one process."""
    for step in (1, 2):
        save_hf(odd_llama(), folder, step=step)
    test.send('saved')
    test.recv()
    test.send(error_of(save_hf, odd_llama(), folder, step=3))


def test_a_folder_is_taken_over_from_a_process_that_has_saved_there_and_not_taken_back(tmp_path):
    """A notebook saves, then a launcher as its child goes on; two loops at the same time are refused."""
    first, end = Pipe()
    process = start_process(save_twice_and_again, tmp_path / 'hf_model', end)
    end.close()
    assert first.recv() == 'saved'
    for step in (8, 9):
        save_hf(odd_llama(), tmp_path / 'hf_model', step=step)
    first.send('go on')
    assert 'another process has saved here since this one did' in first.recv()
    process.join()
    assert [path.name for path in tmp_path.iterdir()] == ['hf_model']
    assert assert_whole(tmp_path / 'hf_model') == 9
