"""What a writer offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from xhf_hooks.planning.types import Chunk, SavePlan, WriteReceipt
from xhf_hooks.writers.evidence import Sample
from xhf_hooks.writers.file_io.output_file import FileIdentity


class Writer(ABC):
    """Puts chunks at their places in the planned files.

    A save calls :meth:`create` on rank 0; when all ranks know that it is done, on each rank :meth:`open`,
    :meth:`write` any number of times, then :meth:`finish`; and :meth:`abort` at the end, or at any point before. A
    thread that it needs it starts when it is made: later the interpreter may be shutting down, and starts none.

    Attributes:
        all_ranks: Every rank writes, so the folder must be on a file system that all of them see.
        writes_local_shards: Every rank writes its own slices where that can be; only the rest is gathered.
        receives_local_shards: Every rank sends its own slices, where that can be, to the rank that writes the tensor;
            only the rest is gathered.
        samples: From :meth:`finish` on, a few of the bytes that this rank has written into each file.
    """

    all_ranks = False
    writes_local_shards = False
    receives_local_shards = False
    samples: list[Sample]

    @abstractmethod
    def create(self, plan: SavePlan, folder: Path) -> dict[str, FileIdentity]:
        """Make the planned files, with their headers, in the staging folder. Runs on: rank 0.

        Returns:
            What proves to all ranks that they have the same files, by name.
        """

    @abstractmethod
    def open(self, folder: Path, made: Mapping[str, FileIdentity]) -> None:
        """Get ready to write into those files."""

    @abstractmethod
    def write(self, chunk: Chunk) -> None:
        """Accept a chunk. May return before it is on disk, and may wait for room first.

        Raises:
            OSError: This or an earlier chunk could not be written.
        """

    @abstractmethod
    def finish(self) -> list[WriteReceipt]:
        """Wait for all chunks, close the files, and say what this rank has written into each.

        Raises:
            OSError: A chunk could not be written.
            TargetError: A file is not the one that rank 0 made.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drop what is pending, close the files and end the threads. Never raises."""
