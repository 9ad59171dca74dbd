"""The base class of the frontends that a trainer calls: MMEngine's hook and Trainer's callback."""

from __future__ import annotations

from xhf_hooks.runs.run import Run


class RunFrontend:
    """Base of hook and callback: holds the options, and one run."""

    _run: Run | None = None

    @property
    def run(self) -> Run:
        """The current run.

        Raises:
            RuntimeError: Training has not begun.
        """
        if self._run is None:
            raise RuntimeError('training has not begun')
        return self._run

    def close(self) -> None:
        """After interrupted training (Ctrl-C in a notebook): wait for a save in flight and unlock the folder.

        The next training in this process calls it. Runs on: any rank.
        """
        if self._run is not None:
            self._run.close()
            self._run = None
