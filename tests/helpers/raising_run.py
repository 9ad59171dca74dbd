"""A run that ends with an exception; launched by tests/distributed/test_save_on_exception.py.

torchrun --nproc_per_node 2 tests/helpers/raising_run.py WORK_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from tests.helpers.toy_run import run_config, train

RAISES_AFTER = 3
NO_CHECKPOINTS = dict(type='CheckpointHook', interval=-1, by_epoch=False)
SAVES = dict(interval=2, by_epoch=False, save_on_exception=True)


class Boom(RuntimeError):
    """The exception that ends the run."""


@HOOKS.register_module()
class RaisingHook(Hook):
    """Raises after three iterations.

    Args:
        where: 'iter' (after the fourth, which is not counted yet), 'before_iter' (before it), 'val' (in a validation),
            or 'forward' (in the middle of it, with the parameters of a layer gathered).
        ranks: Ranks that raise; None means all.
        error: Name of the exception's class.
    """

    priority = 99

    def __init__(self, where: str = 'iter', ranks: list[int] | None = None, error: str = 'Boom') -> None:
        self._where, self._ranks = where, ranks
        self._error = {'Boom': Boom, 'KeyboardInterrupt': KeyboardInterrupt}[error]

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self._where == 'before_iter':
            self._raise(runner)
        elif self._where == 'forward' and runner.iter == RAISES_AFTER:
            layer = next(module for name, module in runner.model.named_modules() if name.endswith('mlp.up_proj'))
            layer.register_forward_hook(lambda *given: self._raise(runner))

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if self._where == 'iter':
            self._raise(runner)

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if self._where == 'val' and runner.iter > RAISES_AFTER:
            raise self._error('in a validation')

    def _raise(self, runner: Any) -> None:
        if runner.iter == RAISES_AFTER and self._ranks in (None, [dist.get_rank()]):
            raise self._error('what users see')


def raising_config(work_dir: Path, hook: dict[str, Any], raising: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The config of a run of ten iterations; all runs with one stage train identically."""
    hooks = [dict(type='RaisingHook', **raising)]
    return run_config(
        work_dir,
        **{'hook': {**SAVES, **hook}, 'hooks': hooks, 'stage': 3, 'max_iters': 10, **options},
        checkpoint=NO_CHECKPOINTS,
    )


def main() -> None:
    deepspeed.init_distributed(dist_backend='gloo')
    work_dir = Path(sys.argv[1])
    uploads = dict(upload_to=(work_dir / 'stored').absolute().as_uri(), upload_limit='40KB')
    actions = dict(on_saved='touch {output}/file', on_saved_after='upload')
    train(raising_config(work_dir, uploads | actions, {}))


if __name__ == '__main__':
    main()
