"""A run that forks during a background save; launched by tests/distributed/test_forked.py.

python tests/helpers/forking_run.py OUT_DIR

Prints the outcome of each child and of the save, as JSON.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.assert_intact import assert_whole
from tests.helpers.zoo.llamas import odd_llama
from xhf_hooks.options import RunOptions
from xhf_hooks.places.lock import RunLock
from xhf_hooks.planning.types import Step
from xhf_hooks.saves.manager import CheckpointManager
from xhf_hooks.saves.telemetry import RunLog
from xhf_hooks.saves.unwrap import unwrap
from xhf_hooks.writers.output_file import OutputFile

PATIENCE_SECS = 60.0


def become(work: Callable[[], None], number: int | None = None) -> str:
    """Fork a child that does some work, and optionally send it a signal; returns how it ended."""
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, b'x')
        work()
        sys.exit(0)
    os.read(ready, 1)
    if number is not None:
        os.kill(child, number)
    deadline = time.monotonic() + PATIENCE_SECS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 'did not end'


def sleep_on() -> None:
    """Sleep, like a DataLoader worker that waits for work."""
    while True:
        time.sleep(0.01)


def main() -> None:
    folder = Path(sys.argv[1]) / 'hf_model'
    parsed = RunOptions(bucket_size='1MB', async_save=True)
    saves = CheckpointManager(unwrap(odd_llama()), folder, parsed, RunLog(logging.getLogger('test'), 'test'))
    saves.prepare(None, when='now')

    write, go_on = OutputFile.write, threading.Event()
    OutputFile.write = lambda self, *args: (go_on.wait(), write(self, *args))[1]
    saves.save(Step('iter', 3, 3))

    def forget() -> None:
        nonlocal saves
        saves = None
        gc.collect()

    told = {
        'terminated': become(sleep_on, signal.SIGTERM),
        'ended': become(lambda: None),
        'closed': become(saves.close),
        'forgot': become(forget),
        'lock_is_held': not RunLock(folder).acquire(),
        'handler_is_there': callable(signal.getsignal(signal.SIGTERM)),
        'committed_before': folder.exists(),
    }
    go_on.set()
    saves.collect()
    saves.close()
    told['saved'] = assert_whole(folder)
    told['lock_is_free'] = not (folder.parent / '.hf_model.lock').exists()
    print(json.dumps(told))


if __name__ == '__main__':
    main()
