"""Runs the command xhf-convert in this process, and compares what comes out with what the hook wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def convert(*args: str | Path) -> Path:
    """The command, which must succeed; gives OUT."""
    from xhf_hooks.cli.convert import main

    assert main([str(arg) for arg in args]) == 0
    return Path(args[1])


def assert_same_files(folder: Path, expected: Path) -> None:
    """The same bytes in all but the manifest, which tells how a folder came about."""
    found, wanted = _files(folder), _files(expected)
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    differing = [name for name in found if found[name] != wanted[name]]
    assert not differing, differing


def config_of(folder: Path) -> list[tuple[str, Any]]:
    """config.json in its order, without where the model was loaded from, which transformers 4 writes."""
    fields = json.loads((folder / 'config.json').read_text())
    return [(name, value) for name, value in fields.items() if name != '_name_or_path']


def _files(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for path in folder.rglob('*'):
        if path.name == 'adapter_config.json':  # some of its lists are sets, in the order of the process
            fields = json.loads(path.read_text())
            content[str(path.relative_to(folder))] = {
                name: sorted(value) if isinstance(value, list) else value for name, value in fields.items()
            }
        elif path.name == 'config.json':
            content[str(path.relative_to(folder))] = config_of(path.parent)
        elif path.is_file() and path.name != 'xhf_manifest.json':
            content[str(path.relative_to(folder))] = path.read_bytes()
    return content
