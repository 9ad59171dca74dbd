"""The target of the tests in this folder."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs.tiny_checkpoint import commit_one, iteration, stage, tiny_plan
from xhf_hooks.integrity.manifest import parse_manifest
from xhf_hooks.places import replacement
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.store import StoredSaves, send_file
from xhf_hooks.planning.plan import WrittenSave

Claim = Callable[..., CheckpointFolder]
LOCK = {'.hf_model.lock'}


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
        target.prepare(bases)
        return target

    return claimed


@pytest.fixture
def folder(claim) -> CheckpointFolder:
    return claim()


def hidden(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir() if path.name.startswith('.')}


def commit_with(folder: CheckpointFolder, number: int, name: str, text: str) -> None:
    """Make a save with one more file."""
    plan = tiny_plan()
    tensors = stage(folder, plan, number)
    path = folder.staging / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    folder.commit(WrittenSave(plan, tensors, iteration(number)))
    folder.siblings.deletion.wait()


def failing(number: int, *, when: Callable[..., bool] = lambda *args: True, instead_of: Callable[..., Any]) -> Any:
    """A function of the system that fails for some arguments."""

    def call(*args: Any, **options: Any) -> Any:
        if when(*args):
            raise OSError(number, os.strerror(number))
        return instead_of(*args, **options)

    return call


def upload(saves: StoredSaves, local: CheckpointFolder, number: int) -> tuple[str, bytes]:
    """Commit a save to a folder and send its files to a store; returns the arguments of ``saves.publish``."""
    commit_one(local, number)
    data = local.newest_manifest()
    files = parse_manifest(data, '').files
    prefix = saves.begin(f'iter_{number}', files)
    for name, record in files.items():
        send_file(saves.store, prefix, name, local.path / name, record)
    return prefix, data


def publish(saves: StoredSaves, local: CheckpointFolder, number: int) -> None:
    """Commit a save to a folder and upload it."""
    saves.publish(*upload(saves, local, number))
