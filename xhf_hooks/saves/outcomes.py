"""What became of saves: logged as soon as it is known, and passed on to the frontend in the thread that trains."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from xhf_hooks.errors import XhfError
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.saves.telemetry import RunLog, log_save


class Outcomes:
    """Logs the outcome of each save of a run, and calls the frontend.

    Args:
        raises: Whether the option ``on_error`` is 'raise'.
        on_committed: Called with each committed save, in the thread that trains.
        on_result: Called there on rank 0 with the step of a save and the numbers that ``on_saved`` printed for it.

    Attributes:
        has_saved: Whether this run has committed a save.
    """

    def __init__(
        self,
        log: RunLog,
        *,
        raises: bool,
        on_committed: Callable[[CommittedCheckpoint], None],
        on_result: Callable[[Step, Mapping[str, float]], None],
    ) -> None:
        self.raises = raises
        self.has_saved = False
        self._log = log
        self._on_committed = on_committed
        self._on_result = on_result

    def raise_or_log(self, error: XhfError, what: str) -> None:
        """Raise or log an error that all ranks share, depending on ``on_error``."""
        if self.raises:
            raise error
        self._log.error(f'{what} failed and training goes on: {error}.{self._reassurance}')

    def log_outcome(self, step: Step, committed: CommittedCheckpoint | None, error: BaseException | None) -> None:
        """Log what became of a save. Runs on: the thread that saves."""
        if committed is None:
            text = str(error) if isinstance(error, XhfError) else f'{type(error).__name__}: {error}'
            self._log.error(f'the save of {step.label} in the background failed: {text}.{self._reassurance}')
            return
        with self._logging_errors(step):
            log_save(self._log, committed)

    def call_frontend(self, committed: CommittedCheckpoint) -> None:
        """Call the frontend for a committed save. Runs on: the thread that trains."""
        self.has_saved = True
        with self._logging_errors(committed.step):
            self._on_committed(committed)

    def pass_on(self, results: deque[tuple[Step, Mapping[str, float]]]) -> None:
        """Take the results of ``on_saved`` and pass them on. Runs on: the thread that trains."""
        while results:
            step, numbers = results.popleft()
            with self._logging_errors(step):
                self._on_result(step, numbers)

    @property
    def _reassurance(self) -> str:
        """What follows the message of a save that failed."""
        return ' The previous save is still complete.' if self.has_saved else ''

    @contextlib.contextmanager
    def _logging_errors(self, step: Step) -> Iterator[None]:
        """Log what fails in this block: the save is good, and other ranks go on."""
        try:
            yield
        except Exception as error:  # of any type, since the user's code may run here, such as a visualizer
            self._log.error(f'{step.label} is saved, but a callback failed: {type(error).__name__}: {error}')
