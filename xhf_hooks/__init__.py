"""Hugging Face checkpoints out of live DeepSpeed ZeRO and FSDP training.

Importing this package puts :class:`HFCheckpointHook` into MMEngine's HOOKS registry. :func:`save_hf` is the same
save for a loop of your own; ``xhf_hooks.integrations`` has those for other trainers.
"""

from xhf_hooks.version import __version__

from xhf_hooks.call import save_hf  # isort: skip  (needs __version__)
from xhf_hooks.hooks import HFCheckpointHook  # isort: skip

__all__ = ['HFCheckpointHook', '__version__', 'save_hf']
