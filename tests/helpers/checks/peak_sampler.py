"""Samples memory while something runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from xhf_hooks.sources.host_memory import MemoryMeter


@contextmanager
def sampled_memory() -> Iterator[MemoryMeter]:
    """Samples this process's extra anonymous memory each millisecond while the block runs."""
    meter, is_over = MemoryMeter(), threading.Event()

    def sample() -> None:
        while not is_over.wait(0.001):
            meter.sample()

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield meter
    is_over.set()
    thread.join()
