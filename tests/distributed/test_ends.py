"""Every way in which a process may end beside a save or an upload: the outcome of each is told, with its step.

Nothing depends on time: saves and uploads are held back until the process that ends waits for them.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.ranks.launch import HANG_SECS, run_program

STEP = 2


class Run:
    """One run, in this process."""

    def __init__(self, work_dir: Path, **options: Any) -> None:
        from tests.helpers.models.zoo.llamas import odd_llama
        from xhf_hooks.options import RunOptions
        from xhf_hooks.saves.manager import CheckpointManager
        from xhf_hooks.saves.telemetry import RunLog
        from xhf_hooks.saves.unwrap import unwrap

        self.folder, self.ends = work_dir / 'hf_model', threading.Event()
        log = RunLog(logging.getLogger('test'), 'test')
        options = RunOptions(**options)
        self.saves = CheckpointManager(unwrap(odd_llama()), self.folder, options, log, when='now', run=self)

    def save(self, iteration: int = STEP) -> None:
        from xhf_hooks.planning.types import Step

        self.saves.save(Step('iter', iteration, iteration))

    def hold_back(self, what: str) -> None:
        """Let no save, or no upload, end before the process waits for it; 'failing': it then fails."""
        from xhf_hooks.background import listeners
        from xhf_hooks.places.store import StoredSaves
        from xhf_hooks.saves import manager
        from xhf_hooks.writers.output_file import OutputFile

        owner, name = (StoredSaves, 'publish') if what == 'upload' else (OutputFile, 'write')
        work = getattr(owner, name)

        def late(*args: Any) -> None:
            self.ends.wait(HANG_SECS)
            ThreadPoolExecutor(1).submit(int).result()  # as asyncio does to look up the host of a store
            if what == 'failing':
                raise OSError(28, 'No space left on device')
            work(*args)

        setattr(owner, name, late)
        poll = listeners.poll

        def at_end(is_over: Callable[[], bool], secs: float = math.inf) -> bool:
            if secs > 0:
                self.ends.set()
            return poll(is_over, secs)

        listeners.poll = manager.poll = at_end


def requested(run: Run) -> None:
    """The save that the signal asked for comes after the one in flight."""
    os.kill(os.getpid(), signal.SIGHUP)
    for iteration in range(STEP + 1, 100):
        run.saves.save_if_asked(_step(iteration))


def handled(run: Run) -> None:
    """The user's handler lets training go on: later saves are waited for, too."""
    os.kill(os.getpid(), signal.SIGTERM)
    run.ends.clear()
    run.saves.look()
    run.save(STEP + 1)
    raise RuntimeError('training failed')


def forgotten(run: Run) -> None:
    """The last thing that knew the run is gone when the process ends."""
    run.saves.collect()
    gone = weakref.ref(run.saves)
    run.saves = None
    gc.collect()
    print('forgotten', gone() is None)


def in_a_thread(run: Run) -> None:
    def train() -> None:
        threading.main_thread().join()
        raise RuntimeError('training failed')

    threading.Thread(target=train).start()


def _step(iteration: int) -> Any:
    from xhf_hooks.planning.types import Step

    return Step('iter', iteration, iteration)


def raised(run: Run, error: BaseException) -> None:
    raise error


#: Name to what ends the process, and its exit status.
WAYS: dict[str, tuple[Callable[[Run], None], int]] = {
    'nothing': (lambda run: None, 0),
    'exception': (lambda run: raised(run, RuntimeError('training failed')), 1),
    'sys_exit': (lambda run: sys.exit(3), 3),
    'ctrl_c': (lambda run: os.kill(os.getpid(), signal.SIGINT), 1),
    'sigterm': (lambda run: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
    'sighup': (lambda run: os.kill(os.getpid(), signal.SIGHUP), -signal.SIGHUP),
    'sigxcpu': (lambda run: os.kill(os.getpid(), signal.SIGXCPU), -signal.SIGXCPU),
    'requested': (requested, -signal.SIGHUP),
    'handled': (handled, 1),
    'forgotten': (forgotten, 0),
    'in_a_thread': (in_a_thread, 0),
    'close': (lambda run: run.saves.close(), 0),
}
SAVED = {'requested': [STEP, STEP + 2], 'handled': [STEP, STEP + 1]}
FAILING = ('exception', 'sigterm', 'close')


def main() -> None:
    work_dir, way, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(levelname)s %(message)s')
    if way == 'handled':
        signal.signal(signal.SIGTERM, lambda *_: print('the handler is called'))
    asked = 'SIGHUP' if way == 'requested' else None
    store = (work_dir / 'stored').absolute().as_uri()
    run = Run(work_dir, bucket_size='1MB', async_save=True, upload_to=store, upload_keep=9, save_on_signal=asked)
    run.hold_back(what)
    run.save()
    WAYS[way][0](run)


@pytest.mark.parametrize(('way', 'what'), [*((way, 'save') for way in WAYS), *((way, 'failing') for way in FAILING)])
def test_the_outcome_is_told(way, what, tmp_path):
    (ended,) = run_program(__file__, tmp_path, way, 'upload' if way == 'forgotten' else what)
    said = ended.stdout
    assert ended.returncode == WAYS[way][1], said + ended.stderr
    if what == 'failing':
        assert said.count('ERROR test: the save of iter_2 in the background failed: stage ') == 1, said
        return
    for iteration in SAVED.get(way, [STEP]):
        assert said.count(f'INFO test: saved iter_{iteration} to hf_model') == 1, said
        assert f'INFO test: uploaded iter_{iteration} to ' in said, said
    assert assert_whole(tmp_path / 'hf_model') == SAVED.get(way, [STEP])[-1]
    assert (way == 'handled') == ('the handler is called' in said)
    assert (way == 'forgotten') == ('forgotten True' in said)


if __name__ == '__main__':
    main()
