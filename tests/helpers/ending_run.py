"""A run that ends during a background save; launched by tests/distributed/test_async.py.

torchrun --nproc_per_node 2 tests/helpers/ending_run.py WORK_DIR exception|sigterm
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from tests.helpers.toy_run import run_config, train
from xhf_hooks.writers.file_io.output_file import OutputFile

ENDS_AT = 3
WRITE_SECS = 0.2


@HOOKS.register_module()
class EndingHook(Hook):
    """Ends the run at iteration 3 in the given way, on every rank."""

    def __init__(self, how: str) -> None:
        self._how = how

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter + 1 == ENDS_AT:
            if self._how == 'exception':
                raise RuntimeError('the run ends here')
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # the handler runs before this ends


def main() -> None:
    work_dir, how = Path(sys.argv[1]), sys.argv[2]
    write = OutputFile.write
    OutputFile.write = lambda self, *args: (time.sleep(WRITE_SECS), write(self, *args))[1]
    deepspeed.init_distributed(dist_backend='gloo')
    hook = dict(async_save=True, interval=2, by_epoch=False, verify='full')
    hook.update(upload_to=(work_dir / 'stored').absolute().as_uri(), on_saved='sleep 1000', on_saved_after='upload')
    config = run_config(work_dir, hook=hook, stage=3, max_iters=10)
    config['custom_hooks'].append(dict(type='EndingHook', how=how))
    train(config)


if __name__ == '__main__':
    main()
