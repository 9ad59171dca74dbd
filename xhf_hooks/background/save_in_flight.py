"""The thread in which saves are made beside training: a listener, whose work is the save itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from xhf_hooks.background.listeners import Listener
from xhf_hooks.planning.types import CommittedCheckpoint, Step


@dataclass(eq=False)
class SaveInFlight:
    """One save.

    Attributes:
        tell: Called as soon as it has ended, with what was made or the error.
        outcome: Done once it was told.
    """

    step: Step
    make: Callable[[], CommittedCheckpoint]
    tell: Callable[[CommittedCheckpoint | None, BaseException | None], object]
    outcome: Future[CommittedCheckpoint] = field(default_factory=Future)

    def __str__(self) -> str:
        return self.step.label


class SavesInBackground(Listener[SaveInFlight]):
    """Makes saves. :meth:`close` does not stop one that is being made: other ranks would wait."""

    name, must_finish = 'a save in the background', True

    def work(self, job: SaveInFlight) -> None:
        """Make a save, tell its outcome, and hand it to the thread that trains."""
        made, error = None, None
        try:
            made = job.make()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(Exception):  # the thread goes on
            job.tell(made, error)
        if made is not None:
            job.outcome.set_result(made)
        else:
            job.outcome.set_exception(error)
