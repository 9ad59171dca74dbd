"""What runs have uploaded to a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xhf_hooks.places.objects import Store


def keys_in(store: Store) -> set[str]:
    """The keys of all objects under the URL of a store."""
    return {path.removeprefix(f'{store._root}/') for path in store._fs.find(store._root)}


def folders_in(store: Store) -> set[str]:
    """The first parts of the keys that have several."""
    return {key.partition('/')[0] for key in keys_in(store) if '/' in key}


def runs_in(url: str, options: Mapping[str, Any] | None = None) -> list[Store]:
    """The stores at the prefixes of the runs that have uploaded to a URL, in the order of their names."""
    return [Store.open(f'{url}/{name}', options) for name in sorted(folders_in(Store.open(url, options)))]
