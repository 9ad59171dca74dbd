"""Rebuilds the model of a checkpoint on the meta device, for the exporters."""

from __future__ import annotations

from xhf_hooks.offline.model.build import build_meta_model
from xhf_hooks.offline.model.match import match_checkpoint
from xhf_hooks.offline.model.meta_model import MetaModel
from xhf_hooks.offline.model.run_config import RunConfig, find_run_config

__all__ = ['MetaModel', 'RunConfig', 'build_meta_model', 'find_run_config', 'match_checkpoint']
