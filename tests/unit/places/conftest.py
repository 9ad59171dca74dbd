"""The target of the tests in this folder."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from xhf_hooks.places import replacement
from xhf_hooks.places.checkpoint_folder import CheckpointFolder

Claim = Callable[..., CheckpointFolder]


@pytest.fixture(params=['exchange', 'fallback'])
def both_ways(request, monkeypatch):
    """With the atomic exchange of Linux, and as on file systems without it."""
    if request.param == 'fallback':
        monkeypatch.setattr(replacement, 'exchange', lambda one, other: False)


@pytest.fixture
def said() -> list[str]:
    """The warnings."""
    return []


@pytest.fixture
def claim(tmp_path, said) -> Claim:
    """Claims ``hf_model``, once more if that is asked for."""

    def claimed(max_keep: int = 1, bases: Iterable[Path] = (), **options: Any) -> CheckpointFolder:
        target = CheckpointFolder(tmp_path / 'hf_model', max_keep, warn=said.append, **options)
        target.lock_and_recover(bases)
        return target

    return claimed


@pytest.fixture
def folder(claim) -> CheckpointFolder:
    return claim()
