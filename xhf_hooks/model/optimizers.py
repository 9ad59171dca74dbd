"""Finds the torch optimizer inside an engine's optimizer."""

from __future__ import annotations

from typing import Any

import torch

#: DeepSpeed optimizers that change no copy of a weight before the inner optimizer steps, as
#: tests/distributed/test_deferred_copy.py shows; and attributes of theirs that lead to other steps or weights on NVMe.
_KNOWN = ('DeepSpeedZeroOptimizer', 'DeepSpeedZeroOptimizer_Stage3', 'BF16_Optimizer', 'FP16_UnfusedOptimizer')
_ELSEWHERE = ('zenflow', 'backup_optimizer', 'swap_optimizer', 'params_in_nvme_and_cpu')


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer whose step is the first thing in an iteration that changes weights; None if unknown.

    Args:
        optimizer: A torch optimizer, or a wrapper or DeepSpeed optimizer that holds one as ``optimizer``.
    """
    while (inner := getattr(optimizer, 'optimizer', None)) is not None:
        if type(optimizer).__module__.startswith('deepspeed.'):
            is_known = type(optimizer).__name__ in _KNOWN
            if not is_known or any(getattr(optimizer, name, False) for name in _ELSEWHERE):
                return None
        optimizer = inner
    return optimizer if '_optimizer_step_pre_hooks' in getattr(optimizer, '__dict__', ()) else None
