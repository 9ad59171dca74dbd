"""A save that is made in the background: the job of the thread that makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from xhf_hooks.planning.types import CommittedCheckpoint, Step


@dataclass(eq=False)
class SaveInFlight:
    """One save. :meth:`.BackgroundTask.close` does not stop one that is being made: other ranks would wait.

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

    def save(self) -> None:
        """Make the save, report its outcome, and hand it to the thread that trains."""
        made, error = None, None
        try:
            made = self.make()
        except BaseException as raised:  # of any type: the thread that trains waits for this outcome
            error = raised
        with contextlib.suppress(Exception):  # of any type: so does the next save, for this thread
            self.report_outcome(made, error)
        # They may hold the copy, and the model: freed now, while an end of the process still waits for this thread.
        # Later, the interpreter would end the thread in torch's code, which aborts the process
        del self.make, self.report_outcome
        if made is not None:
            self.outcome.set_result(made)
        else:
            self.outcome.set_exception(error)
