"""A disk on which each write takes long."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from xhf_hooks.writers.output_file import OutputFile

WRITE_SECS = 0.02


@contextmanager
def slow_disk(write_secs: float = WRITE_SECS) -> Iterator[None]:
    """A save in the background is in flight for some iterations."""
    write = OutputFile.write

    def write_slowly(self: OutputFile, *args: Any) -> None:
        time.sleep(write_secs)
        write(self, *args)

    with mock.patch.object(OutputFile, 'write', write_slowly):
        yield
