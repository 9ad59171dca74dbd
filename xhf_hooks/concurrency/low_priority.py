"""Gives threads a lower priority than training."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

#: Added to the nice value. Where all processors are wanted, five levels leave a thread a quarter of one. With ten (a
#: tenth) and 19 (a sixty-eighth) a save took two and three times as long as with five on a busy machine, and a thread
#: that is made to wait may hold Python's lock, for which training then waits as well.
_NICER = 5


def lower_priority() -> None:
    """Lower the priority of the calling thread, and of threads that it starts later, but not of the process.

    On Linux nice values belong to threads, and the priority at the disk follows from them (ioprio_set(2)). Where that
    is not so, or is refused, nothing happens. It cannot be taken back without privileges, so the thread should end
    with its work.
    """
    if sys.platform == 'linux':
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
