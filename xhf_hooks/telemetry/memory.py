"""Measures the memory of a save and returns freed memory to the system."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_STATM = Path('/proc/self/statm')


class MemoryMeter:
    """Extra anonymous memory since its creation, in bytes. The peak is the largest value that :meth:`sample` saw."""

    def __init__(self) -> None:
        self._start = _anonymous_nbytes()
        self.peak_extra_nbytes = 0

    def sample(self) -> int:
        """Extra memory now."""
        extra = _anonymous_nbytes() - self._start
        self.peak_extra_nbytes = max(self.peak_extra_nbytes, extra)
        return extra


def return_freed_memory() -> None:
    """Return freed memory to the system.

    glibc keeps freed pages in each thread's arena, and gloo's threads have arenas of their own. Without this call, a
    save of many tensors would hold several times the memory that it uses. Does nothing without glibc.
    """
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
    if trim is not None:
        trim(0)


def _anonymous_nbytes() -> int:
    """Resident memory that is neither file pages nor shared (proc(5), statm); 0 where there is no /proc."""
    try:
        content = _STATM.read_text()
    except FileNotFoundError:
        return 0
    _, resident, shared, *_ = content.split()
    return (int(resident) - int(shared)) * os.sysconf('SC_PAGE_SIZE')
