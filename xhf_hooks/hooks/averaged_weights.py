"""Which weights of a run are saved: those averaged by MMEngine's EMAHook, or the live ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmengine.hooks import EMAHook, Hook

from xhf_hooks.errors import OptionError
from xhf_hooks.model.unwrap import Unwrapped
from xhf_hooks.sources import Fsdp1Source, Fsdp2Source, Zero3Source, source_for
from xhf_hooks.telemetry.log import RunLog

_ENGINES = {Zero3Source: 'ZeRO-3', Fsdp1Source: 'FSDP', Fsdp2Source: 'FSDP'}
_OR_LIVE = 'or set ema=False to save the live weights'


def choose_weights(unwrapped: Unwrapped, hooks: Sequence[Hook], own: Hook, *, ema: bool, log: RunLog) -> Unwrapped:
    """The trained model, read from the copy that an EMAHook averages, if the run has one. Runs on: all ranks.

    Between iterations that copy is what validation scores and what CheckpointHook writes as ``state_dict``; before the
    averaging begins it equals the live model (mmengine ``hooks/ema_hook.py``). It is read in place; nothing is swapped.

    Args:
        hooks: Of the run, in call order.
        own: The hook that saves.
        ema: The option: False leaves the model as it is.

    Raises:
        OptionError: The averaged weights cannot be read when ``own`` is called; the same on all ranks.
    """
    averaging = [hook for hook in hooks if isinstance(hook, EMAHook)]
    for hook in averaging:
        if hooks.index(hook) > hooks.index(own):  # after validation it would find them swapped
            raise OptionError(
                'custom_hooks',
                f'EMAHook before {type(own).__name__}: leave both at their default priorities',
                f'priority {hook.priority} after {own.priority}',
            )
    if not averaging or not ema:
        return unwrapped
    if len(averaging) > 1:
        raise OptionError('ema', f'one EMAHook in the run, {_OR_LIVE}', f'{len(averaging)} of them')
    source = type(source_for(unwrapped.root))
    if source in (Zero3Source, Fsdp1Source, Fsdp2Source):
        raise OptionError(
            'ema',
            f'an EMAHook in a run whose parameters are not partitioned, as in DDP and at ZeRO-0 to 2 (its copy of '
            f'partitioned ones is empty): leave EMAHook out, {_OR_LIVE}',
            f'parameters partitioned by {_ENGINES[source]}',
        )
    averaged = averaging[0].ema_model
    log.info(f'saving the weights averaged by EMAHook ({type(averaged).__name__})')
    if unwrapped.engine is not None:
        log.warning(
            "DeepSpeed's checkpoints do not hold the averaged weights, so a resumed run begins a new average "
            'with the live ones'
        )
    # The average has no fp32 master weights, whatever the engine has
    return replace(unwrapped, root=averaged.module, facts={**unwrapped.facts, 'weights': 'averaged'}, engine=None)
