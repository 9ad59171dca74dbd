"""Object stores and other places that fsspec opens by URL: multipart objects, and saves that are published at once."""

from xhf_hooks.stores.open_store import open_store
from xhf_hooks.stores.store import ObjectInfo, Store

__all__ = ['ObjectInfo', 'Store', 'open_store']
