"""Object stores and other places that fsspec names by a URL: objects written in parts, saves that appear whole."""

from xhf_hooks.stores.open_store import open_store
from xhf_hooks.stores.store import ObjectInfo, Store

__all__ = ['ObjectInfo', 'Store', 'open_store']
