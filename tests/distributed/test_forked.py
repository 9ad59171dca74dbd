"""Children that are forked while a save is in flight, as DataLoader's workers are, end as if there were none."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.ranks.launch import HANG_SECS, run_program


def become(work: Callable[[], None], number: int | None = None) -> int:
    """Fork a child that does some work, and optionally send it a signal; returns its exit status.

    A child that hangs says where, on stderr, and exits with status 1.
    """
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(HANG_SECS / 2, exit=True)
        os.write(tell, b'x')
        work()
        sys.exit(0)
    os.read(ready, 1)
    if number is not None:
        os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """A run that forks during a background save; prints how each child and the save ended."""
    from tests.distributed.test_ends import Run
    from xhf_hooks.places.lock import RunLock
    from xhf_hooks.writers.output_file import OutputFile

    run = Run(Path(sys.argv[1]), bucket_size='1MB', async_save=True)
    write, go_on = OutputFile.write, threading.Event()
    OutputFile.write = lambda self, *args: (go_on.wait(), write(self, *args))[1]
    run.save(3)

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
    go_on.set()
    run.saves.collect()
    run.saves.close()
    told['saved'] = assert_whole(run.folder)
    told['lock_is_free'] = not (run.folder.parent / '.hf_model.lock').exists()
    print(json.dumps(told))


def test_children_neither_wait_for_the_save_nor_end_it(tmp_path):
    (ended,) = run_program(__file__, tmp_path)
    assert ended.returncode == 0, ended.stderr[-5000:]
    statuses = {'terminated': -signal.SIGTERM, 'ended': 0, 'closed': 0, 'forgot': 0}
    meanwhile = {'lock_is_held': True, 'handler_is_there': True, 'committed_before': False}
    assert json.loads(ended.stdout.splitlines()[-1]) == statuses | meanwhile | {'saved': 3, 'lock_is_free': True}


if __name__ == '__main__':
    main()
