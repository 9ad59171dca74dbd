"""Deletes saves that are no longer needed, in background threads. Runs on: rank 0."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from xhf_hooks.system.threads import lower_priority, wait_until


class BackgroundDeletion:
    """Deletes in threads of low priority, so that neither the other ranks nor training wait for the disk.

    Deleting 1 GB takes 0.3 s on ext4. A folder has its last name before it is deleted, so a kill leaves what the
    next run deletes. Wait for it before the folder is unlocked and before the process ends: the interpreter does not.

    Attributes:
        name: Its name in the log.
        must_finish: An end waits for it even when training was interrupted.
    """

    must_finish = True

    def __init__(self, name: str) -> None:
        self.name = f'the deletion of older saves of {name}'
        self._threads: list[threading.Thread] = []

    def start(self, delete: Callable[[], object]) -> None:
        """Call ``delete``, which raises nothing, in another thread."""

        def work() -> None:
            lower_priority()
            delete()

        thread = threading.Thread(target=work, name='xhf-delete', daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter exits, or no more threads are allowed
            delete()
            return
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def left(self) -> list[str]:
        """Says how much is still being deleted. Nothing in a forked child, where no thread goes on."""
        n_left = sum(thread.is_alive() for thread in self._threads)
        return [f'{n_left} of them'] if n_left else []

    def wait(self, secs: float = math.inf) -> bool:
        """Wait until all is deleted; returns False if time ran out. Several threads may wait."""
        return wait_until(lambda: not self.left(), secs)

    def close(self) -> None:
        """Does nothing: what is not deleted yet stays for the next run."""
