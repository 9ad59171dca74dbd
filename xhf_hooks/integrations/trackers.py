"""Numbers of saves for TensorBoard, W&B, Trackio and the other trackers of ``TrainingArguments.report_to``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from xhf_hooks.planning.types import Step


class Trackers:
    """The trackers of a Trainer, and its ``log_history``, which goes into trainer_state.json.

    ``Trainer.log`` passes numbers to all callbacks, on all ranks; TRL's adds the averages since its last call, which a
    call in between would tear apart. So the trackers alone are called, as ``Trainer.log`` calls them.

    Args:
        callbacks: The callbacks of the Trainer.
    """

    def __init__(self, callbacks: Sequence[TrainerCallback], args: TrainingArguments, state: TrainerState) -> None:
        from transformers.integrations import INTEGRATION_TO_CALLBACK

        kinds = tuple(INTEGRATION_TO_CALLBACK.values())
        self._trackers = [callback for callback in callbacks if isinstance(callback, kinds)]
        self._args = args
        self._state = state

    def report(self, step: Step, numbers: Mapping[str, float]) -> None:
        """Report numbers of a save. Runs on: all ranks; rank 0 does it."""
        if not self._state.is_world_process_zero:
            return
        self._state.log_history.append({**numbers, 'step': step.iteration})
        state = copy.copy(self._state)
        state.global_step = step.iteration  # training goes on beside background saves and on_saved
        for tracker in self._trackers:
            tracker.on_log(self._args, state, None, logs=dict(numbers))


def callbacks_beside(callback: TrainerCallback) -> list[TrainerCallback]:
    """The callbacks of the Trainer that is calling this one, which comes first from now on.

    Trainer passes a callback neither itself nor the others, so they are found where it calls from; empty if something
    else calls. A tracker ends when training ends, so it has to be called after the last save.
    """
    frame = inspect.currentframe()
    while frame is not None:
        handler: Any = frame.f_locals.get('self')
        if isinstance(handler, CallbackHandler):
            if callback in handler.callbacks:  # else within another one
                handler.callbacks.remove(callback)
                handler.callbacks.insert(0, callback)
            return handler.callbacks
        frame = frame.f_back
    return []
