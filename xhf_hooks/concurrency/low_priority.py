"""Gives threads a lower priority than training."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

#: Added to the nice value. When all cores are busy, five levels leave a thread a quarter of a core. With ten (a tenth)
#: and 19 (a sixty-eighth), a save took two and three times as long as with five on a busy machine; and a thread that
#: is kept waiting may hold the GIL, so that training waits, too.
_NICER = 5


def lower_priority() -> None:
    """Lower the priority of the calling thread and of threads that it starts later, not of the process.

    On Linux nice values belong to threads, and I/O priorities follow from them (ioprio_set(2)). Does nothing on other
    systems, or if it is refused. It cannot be undone without privileges, so the thread should end with its work.
    """
    if sys.platform == 'linux':
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
