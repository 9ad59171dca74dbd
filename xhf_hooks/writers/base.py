"""What a writer offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from xhf_hooks.records import Chunk, SavePlan, WriteReceipt


class Writer(ABC):
    """Puts chunks at their places in the planned files.

    A save calls, on each rank: :meth:`open`, :meth:`write` any number of times, then :meth:`finish`;
    or :meth:`abort` at any point.
    """

    @abstractmethod
    def open(self, plan: SavePlan, folder: Path, rank: int) -> None:
        """Create this rank's files in the staging folder."""

    @abstractmethod
    def write(self, chunk: Chunk) -> None:
        """Accept a chunk. May return before it is on disk, and may wait for room first.

        Raises:
            OSError: This or an earlier chunk could not be written.
        """

    @abstractmethod
    def finish(self) -> list[WriteReceipt]:
        """Wait for all chunks and close the files.

        Raises:
            OSError: A chunk could not be written.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drop what is pending and close the files. Never raises."""
