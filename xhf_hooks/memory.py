"""How much memory a save takes from this process."""

from __future__ import annotations

import os
from pathlib import Path

_STATM = Path('/proc/self/statm')


class MemoryMeter:
    """Extra anonymous memory since its creation, in bytes, as far as :meth:`sample` was called at the peaks."""

    def __init__(self) -> None:
        self._start = _anonymous_nbytes()
        self.peak_extra_nbytes = 0

    def sample(self) -> None:
        self.peak_extra_nbytes = max(self.peak_extra_nbytes, _anonymous_nbytes() - self._start)


def _anonymous_nbytes() -> int:
    """Resident memory that is neither file pages nor shared (proc(5), statm); 0 where there is no /proc."""
    if not _STATM.exists():
        return 0
    _, resident, shared, *_ = _STATM.read_text().split()
    return (int(resident) - int(shared)) * os.sysconf('SC_PAGE_SIZE')
