"""MMEngine's hook."""

from __future__ import annotations

from xhf_hooks.hooks.hf_checkpoint_hook import HFCheckpointHook

__all__ = ['HFCheckpointHook']
