"""Samples memory while something runs."""

from __future__ import annotations

import threading

from xhf_hooks.sources.host_memory import MemoryMeter


class PeakSampler:
    """Samples this process's extra anonymous memory while the block runs.

    Attributes:
        meter: Has the peak.
    """

    def __init__(self, interval_secs: float = 0.001) -> None:
        self._interval_secs = interval_secs

    def __enter__(self) -> PeakSampler:
        self.meter = MemoryMeter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(self._interval_secs):
            self.meter.sample()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
