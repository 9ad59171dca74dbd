"""A disk on which each write takes long, or waits for the test."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from xhf_hooks.files.output_file import OutputFile

WRITE_SECS = 0.02
#: What waits longer hangs.
HANG_SECS = 120.0


@contextmanager
def slow_disk(write_secs: float = WRITE_SECS) -> Iterator[None]:
    """A save in the background is in flight for some iterations."""
    write = OutputFile.write

    def write_slowly(self: OutputFile, *args: Any) -> None:
        time.sleep(write_secs)
        write(self, *args)

    with mock.patch.object(OutputFile, 'write', write_slowly):
        yield


@contextmanager
def held_disk() -> Iterator[threading.Event]:
    """Nothing is written before the event is set: whoever waits for a save until then hangs."""
    may_write, write = threading.Event(), OutputFile.write

    def write_later(self: OutputFile, *args: Any) -> None:
        assert may_write.wait(HANG_SECS), 'the test waits for the save'
        write(self, *args)

    with mock.patch.object(OutputFile, 'write', write_later):
        yield may_write
