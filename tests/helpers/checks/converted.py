"""Runs xhf-convert in this process, and compares its output with the hook's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def convert(*args: str | Path) -> Path:
    """Run the command, which must succeed; returns OUT."""
    from xhf_hooks.cli.convert import main

    assert main([str(arg) for arg in args]) == 0
    return Path(args[1])


def assert_same_files(folder: Path, expected: Path) -> None:
    """Check that all files have the same bytes, except the manifest, which records how the folder was made."""
    found, wanted = _files(folder), _files(expected)
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    differing = [name for name in found if found[name] != wanted[name]]
    assert not differing, differing


def config_of(folder: Path) -> list[tuple[str, Any]]:
    """Items of config.json in order, without the path that the model was loaded from (transformers 4 writes it)."""
    fields = json.loads((folder / 'config.json').read_text())
    return [(name, value) for name, value in fields.items() if name != '_name_or_path']


def _files(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for path in folder.rglob('*'):
        if path.name == 'adapter_config.json':  # some of its lists are sets, whose order differs between processes
            fields = json.loads(path.read_text())
            content[str(path.relative_to(folder))] = {
                name: sorted(value) if isinstance(value, list) else value for name, value in fields.items()
            }
        elif path.name == 'config.json':
            content[str(path.relative_to(folder))] = config_of(path.parent)
        elif path.is_file() and path.name != 'xhf_manifest.json':
            content[str(path.relative_to(folder))] = path.read_bytes()
    return content
