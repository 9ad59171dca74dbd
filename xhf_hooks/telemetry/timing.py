"""Times one save on this rank, by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from xhf_hooks.telemetry.memory import MemoryMeter


class SaveClock:
    """Times one save, stage by stage, and meters its memory. Runs on: all ranks, one thread at a time.

    Args:
        prepare_secs: Time that the save took before this object was created.

    Attributes:
        stage_secs: Seconds by stage, in the order in which they were entered.
    """

    def __init__(self, prepare_secs: float = 0.0) -> None:
        self.meter = MemoryMeter()
        self.stage_secs: dict[str, float] = {'prepare': prepare_secs} if prepare_secs else {}
        self._started = time.perf_counter() - prepare_secs
        self._stalled_secs: float | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stage_secs[name] = self.stage_secs.get(name, 0.0) + time.perf_counter() - started

    def training_goes_on(self) -> None:
        """Called when training goes on; later time does not count as a stall."""
        self._stalled_secs = self.seconds

    @property
    def seconds(self) -> float:
        """Time since the save began."""
        return time.perf_counter() - self._started

    @property
    def stalled_secs(self) -> float:
        """How long the save has stalled training."""
        return self.seconds if self._stalled_secs is None else self._stalled_secs
