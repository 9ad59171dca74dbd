"""A run that ends during a background save; launched by tests/distributed/test_async.py.

python tests/helpers/runs/ending_run.py WORK_DIR exception|sigterm|destroyed    on two ranks

'destroyed' is an exception after which the script destroys the process group.

Nothing depends on time: the upload of the first save ends, and the second save is written, once the process that
ends waits for that save.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from tests.helpers.runs.toy_run import run_config, train
from xhf_hooks.background.listeners import Listener
from xhf_hooks.background.upload import Uploads
from xhf_hooks.places.store import StoredSaves
from xhf_hooks.saves.save import Saver
from xhf_hooks.writers.output_file import OutputFile

ENDS_AT = 3
WRITE_SECS = 0.1
LONGEST_SECS = 120


class Ending:
    """How far the run is. One for each process.

    Attributes:
        saving: The iteration whose save was started last.
        has_begun: Whether the run has been told to end.
        waits: Set once the process that ends waits for the save.
    """

    saving = 0
    has_begun = False
    waits = threading.Event()


@HOOKS.register_module()
class EndingHook(Hook):
    """Ends the run at iteration 3 in the given way, on every rank."""

    def __init__(self, how: str) -> None:
        self._how = how

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter + 1 == ENDS_AT:
            Ending.has_begun = True
            if self._how != 'sigterm':
                raise RuntimeError('the run ends here')
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # the handler runs before this ends


def hold_back() -> None:
    """Make the second save, and the upload of the first, wait for the end of the run."""
    start, write, publish, wait = Saver.start, OutputFile.write, StoredSaves.publish, Listener.wait

    def start_second(self: Saver, folder: Any, step: Any, *args: Any) -> Any:
        Ending.saving = step.iteration
        return start(self, folder, step, *args)

    def write_second(self: OutputFile, *args: Any) -> None:
        if Ending.saving == ENDS_AT - 1:
            Ending.waits.wait(LONGEST_SECS)
            time.sleep(WRITE_SECS)
        write(self, *args)

    def publish_late(self: StoredSaves, *args: Any) -> None:
        Ending.waits.wait(LONGEST_SECS)
        publish(self, *args)

    def wait_at_end(self: Listener, *args: Any) -> bool:
        if Ending.has_begun:
            Ending.waits.set()
        return wait(self, *args)

    Saver.start, OutputFile.write = start_second, write_second
    StoredSaves.publish, Listener.wait = publish_late, wait_at_end
    Uploads.patience_secs = 1.0  # with ranks that have ended


def main() -> None:
    work_dir, how = Path(sys.argv[1]), sys.argv[2]
    hold_back()
    deepspeed.init_distributed(dist_backend='gloo')
    hook = dict(async_save=True, interval=1, by_epoch=False, verify='full')
    hook.update(upload_to=(work_dir / 'stored').absolute().as_uri(), on_saved='sleep 1000')
    config = run_config(work_dir, hook=hook, stage=3, max_iters=10)
    config['custom_hooks'].insert(0, dict(type='EndingHook', how=how))
    try:
        train(config)
    finally:
        if how == 'destroyed':
            torch.distributed.destroy_process_group()


if __name__ == '__main__':
    main()
