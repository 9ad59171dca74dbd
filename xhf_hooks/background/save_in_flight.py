"""The thread that makes saves in the background: the background task whose work is the save itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from xhf_hooks.background.background_tasks import BackgroundTask
from xhf_hooks.collective import Collective
from xhf_hooks.planning.types import CommittedCheckpoint, Step


@dataclass(eq=False)
class SaveInFlight:
    """One save.

    Attributes:
        make: Makes the save.
        report_outcome: Called as soon as the save has ended, with what was committed or the error.
        outcome: Resolves after ``report_outcome`` has returned.
    """

    step: Step
    make: Callable[[], CommittedCheckpoint]
    report_outcome: Callable[[CommittedCheckpoint | None, BaseException | None], object]
    outcome: Future[CommittedCheckpoint] = field(default_factory=Future)

    def __str__(self) -> str:
        return self.step.label


class SavesInBackground(BackgroundTask[SaveInFlight]):
    """Makes saves. :meth:`close` does not stop one that is being made: other ranks would wait.

    Args:
        collective: Connects the ranks for this thread: meanwhile the thread that trains uses another one, also while it
            waits for a save.
    """

    name, must_finish = 'a save in the background', True

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        super().__init__()

    def work(self, job: SaveInFlight) -> None:
        """Make a save, report its outcome, and hand it to the thread that trains."""
        made, error = None, None
        try:
            made = job.make()
        except BaseException as raised:  # of any type: the thread that trains waits for this outcome
            error = raised
        with contextlib.suppress(Exception):  # of any type: so does the next save, for this thread
            job.report_outcome(made, error)
        if made is not None:
            job.outcome.set_result(made)
        else:
            job.outcome.set_exception(error)
