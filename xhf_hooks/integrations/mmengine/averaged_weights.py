"""Chooses the weights to save: those averaged by MMEngine's EMAHook, or the live ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmengine.hooks import EMAHook, Hook

from xhf_hooks.errors import OptionError
from xhf_hooks.runs.telemetry import RunLog
from xhf_hooks.runs.unwrap import Unwrapped
from xhf_hooks.sources import source_for

_OR_LIVE = 'or set ema=False to save the live weights'


def choose_weights(unwrapped: Unwrapped, hooks: Sequence[Hook], own: Hook, *, ema: bool, log: RunLog) -> Unwrapped:
    """The trained model; if the run has an EMAHook, with its averaged weights. Runs on: all ranks.

    EMAHook keeps the averaged weights in a copy of the model. Validation scores that copy, and CheckpointHook saves it
    as ``state_dict``; before averaging begins it equals the live model (mmengine ``hooks/ema_hook.py``). It is read in
    place; nothing is swapped.

    Args:
        hooks: The run's hooks, in call order.
        own: The hook that saves.
        ema: The option ``ema``; False returns the live model.

    Raises:
        OptionError: The averaged weights cannot be read when ``own`` is called. The same on all ranks.
    """
    averaging = [hook for hook in hooks if isinstance(hook, EMAHook)]
    for hook in averaging:
        if hooks.index(hook) > hooks.index(own):  # after validation the weights would still be swapped
            raise OptionError(
                'custom_hooks',
                f'EMAHook before {type(own).__name__}: leave both at their default priorities',
                f'priority {hook.priority} after {own.priority}',
            )
    if not averaging or not ema:
        return unwrapped
    if len(averaging) > 1:
        raise OptionError('ema', f'one EMAHook in the run, {_OR_LIVE}', f'{len(averaging)} of them')
    partitioned_by = source_for(unwrapped.root).partitioned_by
    if partitioned_by is not None:
        raise OptionError(
            'ema',
            f'unpartitioned parameters, as in DDP and at ZeRO-0 to 2, since EMAHook copies partitioned ones as empty '
            f'tensors; remove EMAHook, {_OR_LIVE}',
            f'parameters partitioned by {partitioned_by}',
        )
    averaged = averaging[0].ema_model
    log.info(f'saving the weights averaged by EMAHook ({type(averaged).__name__})')
    if unwrapped.engine is not None:
        log.warning(
            "DeepSpeed's checkpoints do not contain the averaged weights, so a resumed run starts a new average from "
            'the live ones'
        )
    # The averaged weights have no fp32 masters, even if the engine has some
    return replace(
        unwrapped,
        root=averaged.module,
        manifest_fields={**unwrapped.manifest_fields, 'weights': 'averaged'},
        engine=None,
    )
