"""Caches of transformers and of huggingface_hub, for one test each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def use_modules_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers keep copies of models' own code in ``folder``, and forget those imported before."""
    for name in [name for name in sys.modules if name.split('.')[0] == 'transformers_modules']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr('transformers.dynamic_module_utils.HF_MODULES_CACHE', str(folder))
    monkeypatch.setattr(sys, 'path', [str(folder), *sys.path])


def use_hub_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``folder`` be the cache of the Hub, from which nothing is downloaded."""
    import transformers
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(folder))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    if not hasattr(transformers, 'TokenizersBackend'):  # transformers 4 has a constant of its own
        monkeypatch.setattr(transformers.utils.hub, 'TRANSFORMERS_CACHE', str(folder))
    if hasattr(file_download, 'HF_HUB_CACHE'):  # so has huggingface_hub before 0.23
        monkeypatch.setattr(file_download, 'HF_HUB_CACHE', str(folder))
