"""The model that a checkpoint belongs to, rebuilt without memory, for the hook's exporters to look at."""

from __future__ import annotations

from xhf_hooks.meta_model.build import Skeleton, build_skeleton
from xhf_hooks.meta_model.match import fit
from xhf_hooks.meta_model.run_config import RunConfig, find_run_config

__all__ = ['RunConfig', 'Skeleton', 'build_skeleton', 'find_run_config', 'fit']
