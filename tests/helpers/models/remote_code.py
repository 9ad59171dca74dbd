"""Models that come with their own code, loaded in tests one after the other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def use_modules_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers keep copies of such code in ``folder``, and forget those imported before."""
    for name in [name for name in sys.modules if name.split('.')[0] == 'transformers_modules']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr('transformers.dynamic_module_utils.HF_MODULES_CACHE', str(folder))
    monkeypatch.setattr(sys, 'path', [str(folder), *sys.path])
