"""The only place where tests make a DeepSpeed config."""

from collections.abc import Mapping
from typing import Any


def zero_config(
    stage: int, *, bf16: bool = True, sections: Mapping[str, Any] | None = None, **zero: Any
) -> dict[str, Any]:
    """A config for engines, ``zero.Init``, Accelerate, Trainer and MMEngine's strategy.

    At stage 3 even tiny parameters are partitioned, unless ``zero`` says otherwise.

    Args:
        sections: Sections of the config, added to or replacing those set here.
        zero: Fields of the section ``zero_optimization``.
    """
    zero = {'stage': stage, **zero}
    if stage == 3:
        zero.setdefault('stage3_param_persistence_threshold', 0)
    return {
        'train_micro_batch_size_per_gpu': 1,
        'gradient_accumulation_steps': 1,
        'bf16': {'enabled': bf16},
        'zero_optimization': zero,
        'zero_allow_untested_optimizer': True,  # torch's optimizers
        'zero_force_ds_cpu_optimizer': False,
        'steps_per_print': 10**9,
        **(sections or {}),
    }
