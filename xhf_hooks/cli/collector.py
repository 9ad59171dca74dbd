"""Imports without the garbage collector."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def without_collector(*, freeze: bool = False) -> Iterator[None]:
    """Imports make many objects and no garbage: looking for some takes a fifth of their time.

    Args:
        freeze: Nor look through what there is at exit, which takes a second; for a program that soon ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if was_enabled:
            gc.enable()
