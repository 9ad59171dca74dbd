"""The base class of the frontends that a trainer calls: MMEngine's hook and Trainer's callback."""

from __future__ import annotations

from xhf_hooks.saves.run import Run


class RunFrontend:
    """Base of hook and callback: holds the options, and the saves of one run."""

    _saves: Run | None = None

    @property
    def saves(self) -> Run:
        """The saves of the current run.

        Raises:
            RuntimeError: Training has not begun.
        """
        if self._saves is None:
            raise RuntimeError('training has not begun')
        return self._saves

    def close(self) -> None:
        """After interrupted training (Ctrl-C in a notebook): wait for a save in flight and unlock the folder.

        The next training in this process calls it. Runs on: any rank.
        """
        if self._saves is not None:
            self._saves.close()
            self._saves = None
