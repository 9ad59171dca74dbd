"""LLaMA-Factory with the callback: ``llamafactory_run.py RUN.yaml``, on every rank."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

# Imported always, used for sound only; its build for CUDA can't be loaded beside the CPU build of torch
sys.modules['torchaudio'] = ModuleType('torchaudio')
sys.modules['torchaudio'].__spec__ = ModuleSpec('torchaudio', None)

from llamafactory.train.tuner import run_exp  # noqa: E402

from xhf_hooks.integrations.transformers import HFCheckpointCallback  # noqa: E402

run_exp(callbacks=[HFCheckpointCallback(save_strategy='steps', save_steps=2, save_total_limit=2)])
