"""Work-arounds for what versions of DeepSpeed leave behind, in classes and in checkpoints."""

from __future__ import annotations

from torch import nn


def restore_inherited_init(kind: type[nn.Module]) -> None:
    """Remove an ``__init__`` that DeepSpeed gave a class which inherits its own. Runs on: the thread that trains.

    When ``deepspeed.zero.Init`` ends, versions before 0.19 give each class the ``__init__`` that it replaced
    (``_disable_class`` in ``runtime/zero/partition_parameters.py``), also where only a base class had one of its own. A
    class that inherits from a mixin first, such as ``LlamaForSequenceClassification`` of transformers 4.57, then gets
    that of ``PreTrainedModel``, and builds empty from there on, in this package as in transformers.
    """
    replaced = [vars(base)['_old_init'] for base in kind.__mro__[1:] if '_old_init' in vars(base)]
    if '_old_init' not in vars(kind) and any(vars(kind).get('__init__') is init for init in replaced):
        del kind.__init__


def n_steps_before_training(version: tuple[int, ...] | None) -> int:
    """How many steps the optimizer of a checkpoint had counted before training began.

    To allocate their states, DeepSpeed 0.13.1 and older let optimizers make one step without gradients
    (``initialize_optimizer_states`` in ``runtime/zero/stage3.py`` and ``stage_1_and_2.py``); 0.13.5 does not.

    Args:
        version: The numbers of the ``ds_version`` that the checkpoint records, if any.
    """
    return int(version is not None and version < (0, 13, 5))
