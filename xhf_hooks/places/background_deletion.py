"""Deletes saves that are no longer needed, in background threads. Runs on: rank 0."""

from __future__ import annotations

import threading
from collections.abc import Callable

from xhf_hooks.system.threads import lower_priority


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
        """Wait until all is deleted. Does nothing in a forked child, where no thread goes on."""
        while self._threads:
            self._threads.pop().join()
