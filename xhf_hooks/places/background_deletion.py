"""Deletes saves that are no longer needed, in background threads. Runs on: rank 0."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from xhf_hooks.system.threads import lower_priority


def free_nbytes(folder: Path, needed_nbytes: int, deletions: Iterable[BackgroundDeletion]) -> int:
    """Free bytes of a disk. While they are fewer than needed, first waits for one deletion after the other."""
    for deletion in deletions:
        if shutil.disk_usage(folder).free < needed_nbytes:
            deletion.wait()
    return shutil.disk_usage(folder).free


class BackgroundDeletion:
    """Deletes in threads of low priority, so that neither the other ranks nor training wait for the disk.

    Deleting 1 GB takes 0.3 s on ext4. A folder has its last name before it is deleted, so a kill leaves what the
    next run deletes. The interpreter waits for these threads when it exits.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, delete: Callable[[], object]) -> None:
        """Call ``delete``, which raises nothing, in another thread."""

        def work() -> None:
            lower_priority()
            delete()

        thread = threading.Thread(target=work, name='xhf-delete')
        try:
            thread.start()
        except RuntimeError:  # the interpreter exits, or no more threads are allowed
            delete()
            return
        self._threads.append(thread)

    def wait(self) -> None:
        """Wait until all is deleted. Does nothing in a forked child, where no thread goes on.

        Several threads may wait: a save to another folder of the run, if the disk is full, and the end of the run.
        """
        for thread in [*self._threads]:
            thread.join()
            with contextlib.suppress(ValueError):  # another thread has waited, too
                self._threads.remove(thread)
