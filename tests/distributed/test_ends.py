"""Every way in which a process may end beside a save or an upload: the outcome of each is told, with its step.

Nothing depends on time: saves and uploads are held back until the process that ends waits for them.
"""

import faulthandler
import gc
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.ranks.launch import HANG_SECS, run_program
from tests.helpers.runs.engines import open_run
from tests.helpers.runs.tiny_checkpoint import iteration
from xhf_hooks.files.output_file import OutputFile
from xhf_hooks.places import sibling_folders
from xhf_hooks.places.lock import RunLock
from xhf_hooks.places.store import StoredSaves
from xhf_hooks.runs import run as run_module
from xhf_hooks.runs.ends import background_task
from xhf_hooks.runs.ends.run_end import RunEnd
from xhf_hooks.runs.ends.upload import Uploads

STEP = 2


class Run:
    """One run, in this process or on two ranks. Two ranks have a save before, and its command."""

    def __init__(self, work_dir: Path, **options: Any) -> None:
        self.folder, self.ends = work_dir / 'hf_model', threading.Event()
        self.ranks = int(os.environ['WORLD_SIZE'])
        options |= dict(bucket_size='1MB', async_save=True, upload_to=(work_dir / 'stored').absolute().as_uri())
        if self.ranks > 1:
            import deepspeed

            deepspeed.init_distributed(dist_backend='gloo')
            Uploads.patience_secs = 1.0  # with ranks that have ended
            options |= dict(on_saved='sleep 1000')
        self.saves = open_run(odd_llama(), self.folder, trainer=self, **options)

    def save(self, number: int = STEP) -> None:
        self.saves.save(iteration(number))

    def hold_back(self, owner: type, name: str, error: Exception | None = None) -> None:
        """Let no call of a method end before the process waits for it; or let it fail then."""
        work = getattr(owner, name)

        def late(*args: Any) -> None:
            self.ends.wait(HANG_SECS)
            ThreadPoolExecutor(1).submit(int).result()  # as asyncio does to look up the host of a store
            if error is not None:
                raise error
            work(*args)

        setattr(owner, name, late)

    def begin(self, what: str) -> None:
        """Save, and hold it or its upload back; 'failing': it then fails."""
        self.hold_back(StoredSaves, 'publish')
        if self.ranks > 1:
            self.save(1)
            while not self.folder.exists():
                time.sleep(0.02)
        if what != 'upload':
            error = OSError(28, 'No space left on device') if what == 'failing' else None
            self.hold_back(OutputFile, 'write', error)
        self.save()
        wait_until = background_task.wait_until

        def at_end(is_over: Callable[[], bool], secs: float = math.inf) -> bool:
            if secs > 0:
                self.ends.set()
            return wait_until(is_over, secs)

        background_task.wait_until = run_module.wait_until = at_end


def requested(run: Run) -> None:
    """The save that the signal asked for comes after the one in flight."""
    os.kill(os.getpid(), signal.SIGHUP)
    for number in range(STEP + 1, 1000):
        run.saves.save_if_requested(iteration(number))


def handled(run: Run) -> None:
    """The user's handler lets training go on: later saves are waited for, too."""
    os.kill(os.getpid(), signal.SIGTERM)
    run.saves.poll_background()  # returns when the handler has been called
    run.ends.clear()
    run.save(STEP + 1)
    raise RuntimeError('training failed')


class Interrupted(logging.StreamHandler):
    """A signal comes while a line of the user is written: the main thread has the lock of this handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == 'a line of the user':
            os.kill(os.getpid(), signal.SIGTERM)
        super().emit(record)


def in_a_log_handler(run: Run) -> None:
    """The save that is awaited needs the lock that the interrupted code holds."""
    logging.root.handlers[:] = [Interrupted(sys.stdout)]
    logging.root.handlers[0].setFormatter(logging.Formatter('%(levelname)s %(message)s'))
    logging.info('a line of the user')


def forgotten(run: Run) -> None:
    """The last thing that knew the run is gone when the process ends."""
    run.saves.wait_for_background_save()
    gone = weakref.ref(run.saves)
    run.saves = None
    gc.collect()
    print('forgotten', gone() is None)


def in_a_thread(run: Run) -> None:
    def train() -> None:
        threading.main_thread().join()
        raise RuntimeError('training failed')

    threading.Thread(target=train).start()


def destroyed(run: Run) -> None:
    """As scripts do in a ``finally``, before the interpreter exits and waits for the save."""
    try:
        raise RuntimeError('training failed')
    finally:
        dist.destroy_process_group()


def forks(run: Run) -> None:
    """Children that are forked meanwhile, as DataLoader's workers are; prints how each ended, and what then was."""

    def forget() -> None:
        run.saves = None
        gc.collect()

    told = {
        'terminated': become(lambda: time.sleep(HANG_SECS / 4), signal.SIGTERM),
        'ended': become(lambda: None),
        'closed': become(run.saves.close),
        'forgot': become(forget),
        'lock_is_held': not RunLock(run.folder).acquire(),
        'handler_is_there': callable(signal.getsignal(signal.SIGTERM)),
        'committed_before': run.folder.exists(),
    }
    run.saves.close()
    print(json.dumps({**told, 'lock_is_free': not (run.folder.parent / '.hf_model.lock').exists()}))


def become(work: Callable[[], None], number: int | None = None) -> int:
    """Fork a child that does some work, and optionally send it a signal; returns its exit status.

    A child that hangs says where, on stderr, and exits with status 1.
    """
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        # Its thread must block signals from the start: one that it received would not end the main thread's sleep
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        faulthandler.dump_traceback_later(HANG_SECS / 2, exit=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.write(tell, b'x')
        work()
        sys.exit(0)
    os.read(ready, 1)
    if number is not None:
        os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def raised(run: Run, error: BaseException) -> None:
    raise error


def replace_a_save(work_dir: Path, way: str) -> None:
    """End while the save that was replaced is being deleted, which takes until the process waits for that."""
    waits, wait, remove = threading.Event(), RunEnd.wait, sibling_folders.remove_tree
    RunEnd.wait = lambda *args, **more: (waits.set(), wait(*args, **more))[1]
    sibling_folders.remove_tree = lambda path: (waits.wait(HANG_SECS), remove(path))
    signals = 'SIGHUP' if way == 'requested' else None
    run = SimpleNamespace(saves=open_run(odd_llama(), work_dir / 'hf_model', save_on_signal=signals))
    run.saves.save(iteration(1))
    if way != 'requested':
        run.saves.save(iteration(STEP))
    WAYS[way][0](run)


#: Name to what ends the process, and its exit status.
WAYS: dict[str, tuple[Callable[[Run], None], int]] = {
    'nothing': (lambda run: None, 0),
    'exception': (lambda run: raised(run, RuntimeError('training failed')), 1),
    'sys_exit': (lambda run: sys.exit(3), 3),
    'ctrl_c': (lambda run: os.kill(os.getpid(), signal.SIGINT), 1),
    'sigterm': (lambda run: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
    'in_a_log_handler': (in_a_log_handler, -signal.SIGTERM),
    'sighup': (lambda run: os.kill(os.getpid(), signal.SIGHUP), -signal.SIGHUP),
    'sigxcpu': (lambda run: os.kill(os.getpid(), signal.SIGXCPU), -signal.SIGXCPU),
    'requested': (requested, -signal.SIGHUP),
    'handled': (handled, 1),
    'forgotten': (forgotten, 0),
    'in_a_thread': (in_a_thread, 0),
    'close': (lambda run: run.saves.close(), 0),
    'forks': (forks, 0),
    'destroyed': (destroyed, 1),
}
SAVED = {'requested': [STEP, STEP + 2], 'handled': [STEP, STEP + 1]}
ALONE = [way for way in WAYS if way != 'destroyed']
FAILING = ('exception', 'sigterm', 'close')


def main() -> None:
    way, what = sys.argv[2:]
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(levelname)s %(message)s')
    if what == 'deletion':
        replace_a_save(Path(sys.argv[1]), way)
        return
    if way == 'handled':
        signal.signal(signal.SIGTERM, lambda *_: print('the handler is called'))
    run = Run(Path(sys.argv[1]), upload_keep=9, save_on_signal='SIGHUP' if way == 'requested' else None)
    run.begin(what)
    WAYS[way][0](run)


@pytest.mark.parametrize(('way', 'what'), [*((way, 'save') for way in ALONE), *((way, 'failing') for way in FAILING)])
def test_the_outcome_is_told(way, what, tmp_path):
    (ended,) = run_program(__file__, tmp_path, way, 'upload' if way == 'forgotten' else what)
    said = ended.stdout
    assert ended.returncode == WAYS[way][1], said + ended.stderr
    if what == 'failing':
        assert said.count('ERROR test: the save of iter_2 in the background failed: stage ') == 1, said
        return
    for number in SAVED.get(way, [STEP]):
        assert said.count(f'INFO test: saved iter_{number} to hf_model') == 1, said
        assert f'INFO test: uploaded iter_{number} to ' in said, said
    assert assert_whole(tmp_path / 'hf_model') == SAVED.get(way, [STEP])[-1]
    assert (way == 'handled') == ('the handler is called' in said)
    assert (way == 'forgotten') == ('forgotten True' in said)
    if way == 'forks':
        statuses = {'terminated': -signal.SIGTERM, 'ended': 0, 'closed': 0, 'forgot': 0}
        meanwhile = {'lock_is_held': True, 'handler_is_there': True, 'committed_before': False}
        assert json.loads(said.splitlines()[-1]) == statuses | meanwhile | {'lock_is_free': True}


@pytest.mark.parametrize('way', ['nothing', 'exception', 'sys_exit', 'ctrl_c', 'requested', 'close'])
def test_nothing_is_left_of_what_was_replaced(way, tmp_path):
    (ended,) = run_program(__file__, tmp_path, way, 'deletion')
    assert ended.returncode == WAYS[way][1], ended.stdout + ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ['hf_model']
    assert 'waiting for the deletion of older saves of hf_model' in ended.stdout


@pytest.mark.parametrize('way', ['exception', 'sigterm', 'requested'])
def test_two_ranks_finish_their_save_and_upload_it(way, tmp_path):
    ended = run_program(__file__, tmp_path, way, 'save', world_size=2)
    said = '\n'.join(rank.stdout + rank.stderr for rank in ended)
    assert [rank.returncode for rank in ended] == [WAYS[way][1]] * 2, said
    number = assert_whole(tmp_path / 'hf_model')
    assert number > STEP if way == 'requested' else number == STEP, said
    assert 'waiting for a save in the background' in said or way == 'requested', said
    (pointer,) = (tmp_path / 'stored').glob('*/hf_model.json')
    assert json.loads(pointer.read_text())['step']['number'] == number, said
    assert 'in place of other ranks' not in said, 'they stay until rank 0 has begun'
    # The command of the first save is ended, its supervisor perhaps while it starts
    assert 'on_saved for hf_model, iter_1 failed' in said or 'on_saved for hf_model, iter_1 was cancelled' in said
    commands = {path.name for path in (tmp_path / 'hf_model_on_saved').iterdir()}
    assert way == 'requested' or commands == {'iter_1'}, 'no command starts while the save is awaited'
    assert not [path.name for path in tmp_path.iterdir() if 'kept' in path.name]


def test_a_save_whose_process_group_is_destroyed_tells_its_end(tmp_path):
    ended = run_program(__file__, tmp_path, 'destroyed', 'save', world_size=2)
    said = ended[0].stdout + ended[0].stderr
    assert [rank.returncode for rank in ended] == [1, 1], said
    was_saved, failed = 'saved iter_2 to' in said, 'the save of iter_2 in the background failed: ' in said
    assert was_saved != failed, said
    assert assert_whole(tmp_path / 'hf_model') == (STEP if was_saved else 1), said
    assert failed or 'iter_2 is saved, but its upload and on_saved were not begun: ' in said, said


if __name__ == '__main__':
    main()
