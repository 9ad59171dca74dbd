"""Turns the garbage collector off during imports."""

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
    """Turn the collector off in this block. Imports create many objects and no garbage; collection adds about 20 %.

    Args:
        freeze: Also exempt the imported objects from collection at exit, which saves a second; for short commands.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Triton (in torch's CUDA builds) reports frozen objects as leaks at exit
        if freeze and _TRITON not in sys.modules:
            gc.freeze()
        if was_enabled:
            gc.enable()
