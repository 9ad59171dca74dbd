"""The optimizer of torch that an engine's optimizer uses."""

from __future__ import annotations

from typing import Any

import torch

#: Of DeepSpeed: those of which tests/distributed/test_deferred_copy.py shows that they change no weight, in whatever
#: they keep it, before the inner optimizer steps. Their attributes that lead to other steps, and to weights on NVMe.
_KNOWN = ('DeepSpeedZeroOptimizer', 'DeepSpeedZeroOptimizer_Stage3', 'BF16_Optimizer', 'FP16_UnfusedOptimizer')
_ELSEWHERE = ('zenflow', 'backup_optimizer', 'swap_optimizer', 'params_in_nvme_and_cpu')


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The one whose step is the first thing in an iteration that changes a weight; None where that is unknown.

    Args:
        optimizer: One of torch's, or what holds it as ``optimizer``: wrappers, DeepSpeed's optimizers.
    """
    while (inner := getattr(optimizer, 'optimizer', None)) is not None:
        if type(optimizer).__module__.startswith('deepspeed.'):
            is_known = type(optimizer).__name__ in _KNOWN
            if not is_known or any(getattr(optimizer, name, False) for name in _ELSEWHERE):
                return None
        optimizer = inner
    return optimizer if '_optimizer_step_pre_hooks' in getattr(optimizer, '__dict__', ()) else None
