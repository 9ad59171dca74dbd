"""How runs end within a process that goes on: failures told at once, earlier runs closed, forgotten ones freed."""

import gc
import logging
import re
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.stored import runs_in
from tests.helpers.faults.slow_disk import held_disk
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.ranks.launch import HANG_SECS
from tests.helpers.runs.tiny_checkpoint import iteration
from tests.helpers.runs.toy_run import run_config, train
from xhf_hooks.errors import AgreedError, TargetError, XhfError
from xhf_hooks.files.manifest import read_manifest
from xhf_hooks.files.output_file import OutputFile
from xhf_hooks.options import RunOptions
from xhf_hooks.places import sibling_folders
from xhf_hooks.places.objects import Store
from xhf_hooks.places.store import read_pointer
from xhf_hooks.planning.types import Step
from xhf_hooks.runs.ends.each_save import SaveJob
from xhf_hooks.runs.ends.run_end import RunEnd
from xhf_hooks.runs.ends.upload import Uploads
from xhf_hooks.runs.run import Run
from xhf_hooks.runs.run_info import RunInfo
from xhf_hooks.runs.telemetry import RunLog
from xhf_hooks.runs.unwrap import unwrap
from xhf_hooks.system.threads import wait_until


class Frontend:
    """What a frontend holds, and what its callbacks know."""

    def __init__(self) -> None:
        self.model, self.results = odd_llama(), []
        self.saves: list[Run] = []

    def begin(self, folder: Path, suffixes: Sequence[str] = (), **options: Any) -> Run:
        log = RunLog(logging.getLogger('test'), 'test')
        on_result = lambda step, numbers: self.results.append((step.iteration, numbers))  # noqa: E731
        options = RunOptions(bucket_size='1MB', **options)
        info = RunInfo(unwrap(self.model), folder, schedule='now', trainer=self, extra_suffixes=suffixes)
        saves = Run.open(info, options, log, on_result=on_result)
        self.saves.append(saves)
        return saves


@pytest.fixture(autouse=True)
def no_run_before(caplog):
    caplog.set_level(logging.INFO)
    before = signal.getsignal(signal.SIGINT)
    yield
    for end in [*RunEnd._open]:
        end.close()
    assert signal.getsignal(signal.SIGINT) is before


def full(*args: Any) -> None:
    """Of a disk: stands in for a write."""
    raise OSError(28, 'No space left on device')


def ended(saves: Run) -> Run:
    saves._context.background.wait()
    return saves


@pytest.mark.parametrize('on_error', ['continue', 'raise'])
def test_a_failed_background_save_is_told_at_the_next_iteration(on_error, tmp_path, caplog, monkeypatch):
    saves = Frontend().begin(tmp_path / 'hf_model', async_save=True, on_error=on_error)
    with monkeypatch.context() as disk:
        disk.setattr(OutputFile, 'write', full)
        saves.save(iteration(20))
        ended(saves)
    if on_error == 'raise':
        with pytest.raises(AgreedError, match='No space left'):
            saves.poll_background()
    saves.poll_background()
    assert 'iter_20' in caplog.text
    saves.save(iteration(40))
    ended(saves).poll_background()
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert told.startswith(
        "test: the save of iter_20 in the background failed: stage 'write' failed on rank 0: OSError"
    )
    assert assert_whole(tmp_path / 'hf_model') == 40


@pytest.mark.parametrize('async_save', [True, False])
def test_a_failed_save_names_a_previous_one_only_if_there_is_one(async_save, tmp_path, caplog, monkeypatch):
    saves = Frontend().begin(tmp_path / 'hf_model', async_save=async_save)
    for number in (20, 40, 60):
        with monkeypatch.context() as disk:
            if number != 40:
                disk.setattr(OutputFile, 'write', full)
            saves.save(iteration(number))
            saves.wait_for_background_save()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [text.endswith(' The previous save is still complete.') for text in told] == [False, True]


@pytest.mark.parametrize('failing', ['best', 'newest'])
def test_the_last_save_is_made_again_only_if_it_failed_and_not_the_best_one(failing, tmp_path, monkeypatch):
    saves = Frontend().begin(tmp_path / 'hf_model', suffixes=['best'], async_save=True)
    for name, target in (('newest', saves.newest), ('best', saves.extra_targets['best'])):
        with monkeypatch.context() as disk:
            if name == failing:
                disk.setattr(OutputFile, 'write', full)
            saves.save(iteration(20), target)
            saves.wait_for_background_save()
    saves.finish(iteration(20))
    assert assert_whole(tmp_path / 'hf_model') == 20
    assert read_manifest(tmp_path / 'hf_model').commit.number == 1, 'how often it was committed'


@pytest.fixture
def interruptible():
    """A shell lets what it runs in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures('interruptible')
def test_an_earlier_run_with_the_same_signal_is_closed_whatever_its_folder(tmp_path, caplog):
    """It raised, and a notebook still refers to it: Ctrl-C would go to it, and training would go on."""
    earlier, later = Frontend(), Frontend()
    earlier.begin(tmp_path / 'one' / 'hf_model', save_on_signal='SIGINT')
    saves = later.begin(tmp_path / 'two' / 'hf_model', save_on_signal='SIGINT')
    assert RunEnd._open == [saves._end]
    assert f'{tmp_path / "one" / "hf_model"}: an earlier run was interrupted and is now closed' in caplog.text
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        for number in range(1, 9):
            saves.save_if_requested(iteration(number))
    assert assert_whole(tmp_path / 'two' / 'hf_model') > 0


@pytest.mark.parametrize('on_error', ['continue', 'raise'])
@pytest.mark.parametrize('async_save', [True, False])
def test_a_run_that_was_closed_tells_that_it_saves_no_more(on_error, async_save, tmp_path, caplog):
    """It goes on in another thread, and the next run has its folder, which it leaves alone."""
    run, saves, folder = Frontend(), [], tmp_path / 'hf_model'
    thread = threading.Thread(target=lambda: saves.append(run.begin(folder, async_save=async_save, on_error=on_error)))
    thread.start()
    thread.join()
    later = Frontend().begin(folder)
    staging = later.newest.open_staging()
    said = 'this run was closed, by close() or because another run in this process began with the same folder'
    for act in (lambda: saves[0].save(iteration(1)), lambda: saves[0].finish(iteration(2))):
        caplog.clear()
        if on_error == 'raise':
            with pytest.raises(TargetError, match=f'{folder}: {re.escape(said)}'):
                act()
        else:
            act()
            assert f'{folder}: {said}' in caplog.text
    saves[0].save_if_requested(iteration(2))
    saves[0].poll_background()
    assert staging.is_dir()
    later.newest.abort()
    later.save(iteration(3))
    assert assert_whole(folder) == 3


@pytest.mark.parametrize('async_save', [True, False])
def test_an_iteration_is_saved_once_unless_its_weights_have_changed(async_save, tmp_path):
    """The clock, a signal, a schedule and the trainer may all ask for it, by iterations or epochs."""
    run = Frontend()
    saves = run.begin(tmp_path / 'hf_model', suffixes=['best'], async_save=async_save, max_keep_ckpts=2)
    for step in (iteration(4), Step('epoch', 1, 4)):
        saves.save(step, remember_weights=True)
    saves.save(iteration(4), saves.extra_targets['best'])
    saves.wait_for_background_save()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ['hf_model', 'hf_model_best']
    with torch.no_grad():
        next(run.model.parameters()).add_(1)
    saves.save(iteration(4))
    saves.wait_for_background_save()
    assert read_manifest(tmp_path / 'hf_model').commit.number == 2, 'how often it was committed'


def test_a_signal_during_a_save_is_answered_by_it(tmp_path, monkeypatch):
    saves, fsync = Frontend().begin(tmp_path / 'hf_model', save_on_signal='SIGUSR2'), OutputFile.fsync
    monkeypatch.setattr(OutputFile, 'fsync', lambda file: (signal.raise_signal(signal.SIGUSR2), fsync(file)))
    saves.save(iteration(1))
    for number in range(1, 9):
        saves.save_if_requested(iteration(number))
    assert assert_whole(tmp_path / 'hf_model') == 1


def test_what_is_closed_refuses_work_that_would_be_waited_for(tmp_path):
    saves = Frontend().begin(tmp_path / 'hf_model', async_save=True)
    saves.close()
    with pytest.raises(OSError, match='the writer is closed'):
        saves._context.writer.open(saves._context.plan, tmp_path, {})
    with pytest.raises(RuntimeError, match='a save in the background: closed, and takes no more work'):
        saves._context.background.add('a save')


def test_runs_that_go_on_stay(tmp_path):
    """Two hooks of one runner, and the run of another thread."""
    run, other, both = Frontend(), Frontend(), [tmp_path / 'one' / 'hf_model', tmp_path / 'two' / 'hf_model']
    begun, over = threading.Event(), threading.Event()

    def train() -> None:
        other.begin(tmp_path / 'other' / 'hf_model')
        begun.set()
        over.wait()

    thread = threading.Thread(target=train)
    thread.start()
    begun.wait()
    for folder in both:
        run.begin(folder)
    assert len(RunEnd._open) == 3
    with pytest.raises(TargetError, match=f'hook of this run already saves to {both[0]}: is it listed twice in custom'):
        run.begin(both[0])
    for saves, folder in zip(run.saves, both, strict=True):
        saves.save(iteration(1))
        assert assert_whole(folder) == 1
    over.set()
    thread.join()
    later = Frontend().begin(both[1])
    assert RunEnd._open == [other.saves[0]._end, run.saves[0]._end, later._end], (
        'only that of the same folder is closed'
    )


def test_two_hooks_that_upload_to_the_same_url_do_not_meet(tmp_path, caplog):
    run, url = Frontend(), (tmp_path / 'store').as_uri()
    for number, name in enumerate(('one', 'two'), 1):
        run.begin(tmp_path / name / 'hf_model', upload_to=url).save(iteration(number))
    run.saves[0].save(iteration(3))
    for saves in run.saves:
        saves.close()
    assert f'saved iter_2 to {tmp_path}/two/hf_model, ' in caplog.text, 'the names of their folders are the same'
    assert f'saved iter_3 to {tmp_path}/one/hf_model, ' in caplog.text
    assert {read_pointer(store, 'hf_model').newest for store in runs_in(url)} == {'hf_model_iter_3', 'hf_model_iter_2'}


@pytest.mark.parametrize('exit_wait_secs', [0, 0.2])
def test_all_that_has_not_finished_is_told_once_at_any_limit(exit_wait_secs, tmp_path, caplog, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(Uploads, 'process', lambda *args: may_end.wait(HANG_SECS))
    more = {'async_save': True, 'upload_to': (tmp_path / 'stored').as_uri(), 'exit_wait_secs': exit_wait_secs}
    saves = Frontend().begin(tmp_path / 'hf_model', **more)
    saves._after_saves.uploads.add(SaveJob('hf_model', iteration(1), tmp_path, lambda: None, 1))
    with held_disk() as may_write:
        saves.save(iteration(2))
        for _ in range(2):
            saves._end.wait_before_exit()
        may_write.set(), may_end.set()
    told = [message for message in caplog.messages if 'not finished' in message]
    limit = f'not finished within exit_wait_secs={exit_wait_secs:g} s'
    assert told == [f'test: a save in the background: {limit}: iter_2', f'test: uploads: {limit}: hf_model, iter_1']


def test_a_request_that_no_save_answers_is_told(tmp_path, caplog):
    saves = Frontend().begin(tmp_path / 'hf_model', save_on_signal='SIGUSR2')
    signal.raise_signal(signal.SIGUSR2)
    saves.close()
    assert 'SIGUSR2: no save was made: training has ended' in caplog.text


@pytest.mark.parametrize('what', ['saves', 'on_saved', 'upload_to', 'a save that fails'])
def test_a_run_that_is_forgotten_is_freed(what, tmp_path, monkeypatch):
    """After Ctrl-C in a notebook, which notifies nobody."""
    values = {'on_saved': ['echo', '{"a": 1}'], 'upload_to': (tmp_path / 'stored').as_uri()}
    run, threads_before = Frontend(), {*threading.enumerate()}
    saves = run.begin(tmp_path / 'hf_model', async_save=True, **({what: values[what]} if what in values else {}))
    if what == 'a save that fails':
        monkeypatch.setattr(OutputFile, 'write', lambda *args: 1 / 0)
    saves.save(iteration(1))
    del saves
    ended(run.saves[0])
    run.saves[0]._end.wait()
    gone = [weakref.ref(thing) for thing in (run, run.model, run.saves[0])]
    del run
    gc.collect()
    assert [thing() for thing in gone] == [None] * 3
    started = [thread for thread in threading.enumerate() if thread not in threads_before]
    of_run = [thread for thread in started if thread.name != 'xhf-signals']  # that one serves the whole process
    assert wait_until(lambda: not any(thread.is_alive() for thread in of_run), 60), f'{of_run} go on'


def test_a_run_that_does_not_begin_leaves_no_thread(tmp_path):
    """Uploads had begun when the program of ``on_saved`` was not found. A notebook goes on."""
    before = {*threading.enumerate()}
    with pytest.raises(AgreedError, match='no_such_program'):
        Frontend().begin(tmp_path / 'hf_model', upload_to=(tmp_path / 'stored').as_uri(), on_saved=['no_such_program'])
    names = lambda: [each.name for each in threading.enumerate() if each not in before]  # noqa: E731
    assert wait_until(lambda: 'xhf-uploads' not in names(), 60), names()


def test_the_next_run_there_waits_for_the_upload_of_one_that_is_forgotten(tmp_path, monkeypatch):
    """A sweep, whose first training has raised."""
    may_send, send, url = threading.Event(), Store.put_file, (tmp_path / 'stored').as_uri()
    monkeypatch.setattr(Store, 'put_file', lambda *args: (may_send.wait(HANG_SECS), send(*args)))
    run = Frontend()
    run.begin(tmp_path / 'hf_model', upload_to=url).save(iteration(1))
    del run
    gc.collect()
    threading.Timer(0.5, may_send.set).start()
    Frontend().begin(tmp_path / 'hf_model')
    assert may_send.is_set(), 'it did not wait'
    assert [read_pointer(store, 'hf_model').newest for store in runs_in(url)] == ['hf_model_iter_1']


def test_a_run_does_not_replace_that_of_another_which_began_in_the_same_second(tmp_path, monkeypatch):
    """MMEngine gives both one folder, if they have one work_dir. The same runner may train again."""
    clock = SimpleNamespace(time=time.time, localtime=time.localtime, strftime=lambda *args: '20260101_000000')
    monkeypatch.setattr('mmengine.runner.runner.time', clock)
    folder = tmp_path / 'run' / '20260101_000000' / 'hf_model'
    config = run_config(tmp_path / 'run', hook={}, stage=None, max_iters=2)
    first = train(config)
    with pytest.raises(XhfError, match=f'{folder} exists: another process .*; set out_dir to another folder$'):
        train(dict(config, experiment_name='second'))
    assert assert_whole(folder) == 2
    first.train_loop._iter = 0
    first.train()
    assert assert_whole(folder) == 2


def test_when_training_has_ended_what_saves_have_replaced_is_gone(tmp_path, monkeypatch):
    """Not when the script ends: what comes next may move or delete the folder."""
    may_delete, deleted, remove = threading.Event(), [], sibling_folders.remove_tree

    def delete_later(path: Path) -> None:
        assert may_delete.wait(HANG_SECS)
        deleted.append(path.name.partition('-')[0])
        remove(path)

    saves = Frontend().begin(tmp_path / 'hf_model', async_save=True)
    saves.save(iteration(1))
    saves.wait_for_background_save()
    monkeypatch.setattr(sibling_folders, 'remove_tree', delete_later)
    saves.save(iteration(2))
    saves.wait_for_background_save()
    assert deleted == []
    threading.Timer(0.2, may_delete.set).start()
    saves.finish(iteration(2))
    assert deleted == ['.hf_model.discarded']
    assert [path.name for path in tmp_path.iterdir() if 'discarded' in path.name] == []
