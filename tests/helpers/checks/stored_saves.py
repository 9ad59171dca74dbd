"""Saves in a store, as somebody who uses them fetches them."""

from __future__ import annotations

from pathlib import Path

from xhf_hooks.places.objects import Store
from xhf_hooks.places.store import read_pointer


def download_newest(store: Store, folder: Path) -> Path:
    """Download the save that the pointer names; returns its folder, below ``folder``."""
    return download(store, read_pointer(store, 'hf_model').newest, folder)


def download(store: Store, prefix: str, folder: Path) -> Path:
    """Download one save; returns its folder, below ``folder``."""
    for name in store.sizes(prefix):
        key = f'{prefix}/{name}'
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(key))
    return folder / prefix


def bytes_in(folder: Path) -> dict[str, bytes]:
    """Content of each file, by its path there."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}
