"""Hugging Face checkpoints out of live DeepSpeed ZeRO training with MMEngine.

Importing this package puts :class:`HFCheckpointHook` into MMEngine's HOOKS registry.
"""

from xhf_hooks.version import __version__

from xhf_hooks.hooks import HFCheckpointHook  # isort: skip  (needs __version__)

__all__ = ['HFCheckpointHook', '__version__']
