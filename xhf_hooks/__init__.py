"""Hugging Face checkpoints from live DeepSpeed ZeRO and FSDP training, or from the files of finished runs.

If MMEngine is installed, importing this package registers :class:`HFCheckpointHook` in its HOOKS, as a function that
imports the hook when it is built. MMEngine's hooks import its optimizers, which import transformers' Trainer and peft.
That takes seconds, which a conversion does not need. :class:`HFCheckpointCallback` is the same for transformers'
Trainer, :func:`save_hf` for your own loop; ``xhf_hooks.integrations`` has frontends for other trainers.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from xhf_hooks.registry import register_hook
from xhf_hooks.system.versions import __version__, require_packages

if TYPE_CHECKING:
    from xhf_hooks.integrations.mmengine.hf_checkpoint_hook import HFCheckpointHook
    from xhf_hooks.integrations.own_loop import save_hf
    from xhf_hooks.integrations.transformers import HFCheckpointCallback

__all__ = ['HFCheckpointCallback', 'HFCheckpointHook', '__version__', 'save_hf']


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == 'HFCheckpointHook':
        return _hook()
    if name == 'HFCheckpointCallback':
        require_packages('torch', 'transformers')
        from xhf_hooks.integrations.transformers import HFCheckpointCallback

        return HFCheckpointCallback
    if name == 'save_hf':
        from xhf_hooks.integrations.own_loop import save_hf

        return save_hf
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def _hook() -> type[HFCheckpointHook]:
    if find_spec('mmengine') is None:
        raise ImportError(
            "HFCheckpointHook is a hook of MMEngine, which is not installed: pip install 'mmengine>=0.10.3' (and "
            'deepspeed). HFCheckpointCallback and save_hf need no MMEngine',
            name='mmengine',
        )
    from xhf_hooks.integrations.mmengine.hf_checkpoint_hook import HFCheckpointHook

    return HFCheckpointHook


def _build_hook(*args: Any, **options: Any) -> HFCheckpointHook:
    return _hook()(*args, **options)


register_hook('HFCheckpointHook', _build_hook)
