"""Saves of a few bytes in a folder or a store, and system calls that fail."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.runs.tiny_checkpoint import commit_one, stage
from xhf_hooks.files.manifest import parse_manifest
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.store import StoredSaves, send_file

LOCK = {'.hf_model.lock'}


def hidden(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir() if path.name.startswith('.')}


def commit_with(folder: CheckpointFolder, number: int, name: str, text: str) -> None:
    """Make a save with one more file."""
    save = stage(folder, number)
    path = folder.staging / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    folder.commit(save)
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
