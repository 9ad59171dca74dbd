"""The model that a checkpoint belongs to, rebuilt without memory, for the hook's exporters to look at."""

from __future__ import annotations

from xhf_hooks.skeleton.builder import Skeleton, build_skeleton
from xhf_hooks.skeleton.fit import fit
from xhf_hooks.skeleton.run_config import RunConfig, find_run_config

__all__ = ['RunConfig', 'Skeleton', 'build_skeleton', 'find_run_config', 'fit']
