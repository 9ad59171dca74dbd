"""save_hf in a loop: it plans once for a model, and with async_save it hands out the save in flight."""

import copy
import gc
import inspect
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.faults.slow_disk import held_disk
from tests.helpers.models.zoo.llamas import llama, odd_llama
from tests.helpers.ranks.launch import HANG_SECS, REPO_ROOT, run_program
from tests.helpers.runs.engines import open_run
from tests.helpers.runs.tiny_checkpoint import commit_one, iteration
from xhf_hooks import save_hf
from xhf_hooks.errors import AgreedError, TargetError
from xhf_hooks.exporters import hf_assets
from xhf_hooks.files.writer import Writer
from xhf_hooks.integrations.own_loop import OptionsOfCall
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.runs import save_context
from xhf_hooks.system.child_processes import SignalProofChildren


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


@pytest.fixture
def planned(monkeypatch) -> mock.Mock:
    """Counts how often saves are planned."""
    spy = mock.Mock(side_effect=save_context.prepare_saves)
    monkeypatch.setattr(save_context, 'prepare_saves', spy)
    return spy


@pytest.fixture
def disk() -> Iterator[threading.Event]:
    """Nothing is written before it is set."""
    with held_disk() as may_write:
        yield may_write


@pytest.mark.parametrize('async_save', [False, True])
def test_calls_for_one_model_plan_once(tmp_path, planned, monkeypatch, caplog, async_save):
    """Also into other folders; each has the weights of its call."""
    asked = mock.Mock(side_effect=hf_assets.for_older_readers)  # loads the config several times
    monkeypatch.setattr(hf_assets, 'for_older_readers', asked)
    model, made = odd_llama(lora=True), []
    caplog.set_level('INFO')
    for step in (1, 2, 3):
        change(model)
        made.append(save_hf(model, tmp_path / f'step_{step}', step=step, lora='merge', async_save=async_save))
        expected = copy.deepcopy(model).merge_and_unload()
        expected.save_pretrained(tmp_path / f'theirs_{step}')
    if async_save:
        made = [handle.result() for handle in made]
    assert planned.call_count == asked.call_count == 1
    assert [caplog.text.count(text) for text in ('ready to save', 'no tokenizer', 'saved iter_')] == [1, 1, 3]
    for step, committed in enumerate(made, start=1):
        assert assert_whole(committed.path) == step
        assert_same_folder_tensors(committed.path, tmp_path / f'theirs_{step}')


def test_another_plan_for_other_options_and_other_tensors(tmp_path, planned, caplog):
    """Calls repeat nothing that an earlier one has said, but what became of the save, and another plan."""
    caplog.set_level('INFO')
    model = odd_llama()
    other = dict(dtype='bfloat16', max_shard_size='20KB')
    for options in ({}, other, other, {}):
        save_hf(model, tmp_path / 'hf_model', **options)
    assert planned.call_count == 3
    assert [caplog.text.count(text) for text in ('ready to save', 'no tokenizer', 'saved iter_')] == [2, 1, 4]
    model.resize_token_embeddings(model.config.vocab_size + 3)
    save_hf(model, tmp_path / 'hf_model')
    model.config.rope_theta = 5.0  # no tensor: each save asks
    save_hf(model, tmp_path / 'hf_model')
    assert planned.call_count == 5
    model.save_pretrained(tmp_path / 'theirs')
    assert_same_folder_tensors(tmp_path / 'hf_model', tmp_path / 'theirs')


@pytest.mark.parametrize('async_save', [False, True])
def test_what_is_kept_does_not_keep_the_model(tmp_path, async_save):
    """Without the collector of reference cycles: memory of a GPU is needed for the next model."""
    gc.collect()
    gc.disable()
    try:
        model = odd_llama()
        dead = weakref.ref(model)
        for step in (1, 2):
            made = save_hf(model, tmp_path / 'hf_model', step=step, async_save=async_save)
            if async_save:
                made.result()
        del model
        assert dead() is None
    finally:
        gc.enable()


def test_a_copy_of_the_model_has_a_plan_of_its_own(tmp_path, planned):
    model = odd_llama()
    save_hf(model, tmp_path / 'hf_model')
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        change(other)
        save_hf(other, tmp_path / 'hf_model')
        other.save_pretrained(tmp_path / 'theirs')
        assert_same_folder_tensors(tmp_path / 'hf_model', tmp_path / 'theirs')
    assert planned.call_count == 3


def test_the_handle_of_a_save_in_flight(tmp_path, disk):
    """It is returned when the weights are copied: what training does to them later is not saved."""
    model = odd_llama()
    model.save_pretrained(tmp_path / 'theirs')
    handle = save_hf(model, tmp_path / 'hf_model', step=7, async_save=True)
    change(model)
    assert not handle.done() and not (tmp_path / 'hf_model').exists()
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.01)
    disk.set()
    committed = handle.result(HANG_SECS)
    assert handle.done() and committed.path == tmp_path / 'hf_model' and committed.step == iteration(7)
    assert committed.cost.stalled_secs < committed.cost.seconds
    assert handle.result() is committed
    assert_same_folder_tensors(committed.path, tmp_path / 'theirs')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['hf_model', 'theirs'], 'the folder is still locked'


@pytest.mark.parametrize('later', ['call', 'run'])
def test_what_saves_next_waits_for_it(tmp_path, disk, caplog, later):
    """A call for another model and folder does, and a run that has the folder; nobody has kept the handle."""
    save_hf(odd_llama(), tmp_path / 'hf_model', step=1, async_save=True)
    threading.Timer(0.3, disk.set).start()
    if later == 'call':
        save_hf(llama(), tmp_path / 'other', step=2)
        assert assert_whole(tmp_path / 'hf_model') == 1
    else:
        run = open_run(llama(), tmp_path / 'hf_model')
        assert assert_whole(tmp_path / 'hf_model') == 1
        run.save(iteration(2))
        run.close()
        assert assert_whole(tmp_path / 'hf_model') == 2
    assert 'interrupted' not in caplog.text


def test_an_error_in_the_background_is_that_of_the_handle(tmp_path, monkeypatch, caplog):
    model = odd_llama()
    save_hf(model, tmp_path / 'hf_model', step=1, async_save=True).result()
    with monkeypatch.context() as patched:
        patched.setattr(Writer, 'finish', mock.Mock(side_effect=OSError(5, 'injected')))
        handle = save_hf(model, tmp_path / 'hf_model', step=2, async_save=True)
        for _ in range(2):
            with pytest.raises(AgreedError, match='injected'):
                handle.result()
    assert handle.done() and caplog.text.count('the save of iter_2 in the background failed') == 1
    assert assert_whole(tmp_path / 'hf_model') == 1
    assert save_hf(model, tmp_path / 'hf_model', step=3, async_save=True).result().step == iteration(3)


#: Begins a save in the background and ends, as its last argument says.
ENDING = """
import sys, time
from tests.helpers.models.zoo.llamas import odd_llama
from xhf_hooks import save_hf
from xhf_hooks.files.writer import Writer
finish = Writer.finish
Writer.finish = lambda self: (time.sleep(1), finish(self))[1]
save_hf(odd_llama(), sys.argv[1], step=int(sys.argv[2]), async_save=True)
exec(sys.argv[3])
"""
SIGTERM_ITSELF = 'import os, signal; os.kill(os.getpid(), signal.SIGTERM)'


def test_a_process_that_ends_finishes_it(tmp_path):
    """However it ends, and the lock goes with it."""
    ends = ['', 'raise KeyboardInterrupt', 'sys.exit(3)', SIGTERM_ITSELF]
    for step, end in enumerate(ends, start=1):
        arguments = [str(tmp_path / 'hf_model'), str(step), end]
        if step == 1:  # the others are forked, with the imports done
            subprocess.run([sys.executable, '-c', ENDING, *arguments], check=True, cwd=REPO_ROOT)
        else:
            run_program(ENDING, *arguments)
        assert assert_whole(tmp_path / 'hf_model') == step
        assert [path.name for path in tmp_path.iterdir()] == ['hf_model']


def test_a_child_of_a_process_with_a_run_ends_by_a_signal(tmp_path):
    """The signal is blocked in its main thread (system/child_processes.py)."""
    children = SignalProofChildren.start([signal.SIGTERM])
    try:
        (ended,) = run_program(ENDING, str(tmp_path / 'hf_model'), '1', SIGTERM_ITSELF)
    finally:
        children.close()
    assert ended.returncode == -signal.SIGTERM, ended
    assert assert_whole(tmp_path / 'hf_model') == 1


#: What type checkers are shown: the kind of result by ``async_save``, and no option of another name.
TYPED_CALLS = """
from typing import Any
from typing_extensions import assert_type
from xhf_hooks import save_hf
from xhf_hooks.integrations.own_loop import SaveHandle
from xhf_hooks.planning.types import CommittedCheckpoint

def call(model: Any, flag: bool) -> None:
    assert_type(save_hf(model, 'out', step=3), CommittedCheckpoint)
    assert_type(save_hf(model, 'out', async_save=True, dtype='bfloat16'), SaveHandle)
    assert_type(save_hf(model, 'out', async_save=flag), CommittedCheckpoint | SaveHandle)
    save_hf(model, 'out', dtyp='bfloat16')
"""


@pytest.mark.modern_only
def test_type_checkers_know_what_a_call_returns(tmp_path):
    (tmp_path / 'calls.py').write_text(TYPED_CALLS)
    command = [sys.executable, '-m', 'mypy', '--follow-imports', 'silent', str(tmp_path / 'calls.py')]
    finished = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True)
    errors = [line for line in finished.stdout.splitlines() if ': error:' in line]
    (bad_line,) = (i for i, line in enumerate(TYPED_CALLS.splitlines(), start=1) if 'dtyp=' in line)
    assert errors and all(f'calls.py:{bad_line}:' in line for line in errors), finished.stdout + finished.stderr


def test_the_options_that_type_checkers_know_are_those_of_the_call():
    parameters = inspect.signature(save_hf).parameters.values()
    options = {one.name: one.annotation for one in parameters if one.name not in ('model', 'out_dir', 'async_save')}
    known = {name: one.__forward_arg__ for name, one in OptionsOfCall.__annotations__.items()}
    assert known == options


def commit_as_other_process(folder: Path, step: int) -> None:
    """Runs of this process do not know of it."""
    other = CheckpointFolder(folder, 1)
    other.lock_and_recover()
    commit_one(other, step)
    other.unlock()


def test_only_a_save_of_this_process_makes_that_of_another_one_a_conflict(tmp_path, monkeypatch):
    """A call that was refused, such as while another run held the lock, has saved nothing that could be replaced."""
    folder = tmp_path / 'hf_model'
    commit_as_other_process(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, 'lock_and_recover', mock.Mock(side_effect=TargetError('in use')))
        with pytest.raises(AgreedError, match='in use'):
            save_hf(odd_llama(), folder, step=10)
    commit_as_other_process(folder, 2)
    save_hf(odd_llama(), folder, step=11)
    assert assert_whole(folder) == 11


def test_a_conflict_remains_when_the_call_is_tried_again(tmp_path):
    folder = tmp_path / 'hf_model'
    save_hf(odd_llama(), folder, step=1)
    commit_as_other_process(folder, 2)
    for _ in range(2):
        with pytest.raises(AgreedError, match='another process has saved here since this one did'):
            save_hf(odd_llama(), folder, step=3)
    folder.rename(tmp_path / 'moved')
    save_hf(odd_llama(), folder, step=3)
    assert assert_whole(folder) == 3
