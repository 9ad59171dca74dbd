"""Hugging Face checkpoints out of live DeepSpeed ZeRO and FSDP training, or from its old files.

Importing this package registers :class:`HFCheckpointHook` in MMEngine's HOOKS: a function of that name, which imports
the hook when it is built. MMEngine's hooks import its optimizers, and those transformers' Trainer and peft, which takes
seconds that a conversion does not need. :func:`save_hf` is the same save for your own loop; ``xhf_hooks.integrations``
has frontends for other trainers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xhf_hooks.registry import HOOKS
from xhf_hooks.version import __version__

if TYPE_CHECKING:
    from xhf_hooks.api import save_hf
    from xhf_hooks.hooks import HFCheckpointHook

__all__ = ['HFCheckpointHook', '__version__', 'save_hf']


def __getattr__(name: str) -> Any:
    if name == 'HFCheckpointHook':
        from xhf_hooks.hooks import HFCheckpointHook

        return HFCheckpointHook
    if name == 'save_hf':
        from xhf_hooks.api import save_hf

        return save_hf
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def _build_hook(*args: Any, **options: Any) -> HFCheckpointHook:
    from xhf_hooks.hooks import HFCheckpointHook

    return HFCheckpointHook(*args, **options)


if 'HFCheckpointHook' not in HOOKS.module_dict:  # neither this function nor the class, which replaces it
    HOOKS.register_module(name='HFCheckpointHook', module=_build_hook)
