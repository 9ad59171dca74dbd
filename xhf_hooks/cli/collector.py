"""Imports without the garbage collector."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


_TRITON = 'triton._C.libtriton'


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
        # What is frozen is never freed, which triton (in torch's CUDA builds) reports at exit as leaks of its own
        if freeze and _TRITON not in sys.modules:
            gc.freeze()
        if was_enabled:
            gc.enable()
