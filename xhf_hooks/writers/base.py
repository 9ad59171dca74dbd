"""What a writer offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from xhf_hooks.planning.types import Chunk, SavePlan, WriteReceipt
from xhf_hooks.writers.evidence import Sample
from xhf_hooks.writers.file_io.output_file import FileIdentity


class Writer(ABC):
    """Puts chunks at their places in the planned files.

    A save calls :meth:`create` on rank 0; when all ranks know that it is done, on each rank :meth:`open`,
    :meth:`write` any number of times, then :meth:`finish`; and :meth:`abort` at the end, or at any point before. A
    thread that it needs it starts when it is made: later the interpreter may be shutting down, and starts none. It is
    made with the arguments of :class:`~xhf_hooks.writers.stream.StreamWriter`.

    Attributes:
        all_ranks: Every rank writes, so the folder must be on a file system that all of them see.
        writes_local_shards: Every rank writes its own slices where that can be, into all files; only the rest is
            gathered. Without it a file has one writer.
        receives_local_shards: Every rank sends its own slices, where that can be, to the rank that writes the tensor;
            only the rest is gathered.
        front_to_back: It cannot seek: the plan must give it each file from its first byte to its last.
        own_parts_nbytes: Memory that it takes beside what waits for it.
        samples: From :meth:`finish` on, a few of the bytes that this rank has written into each file.
    """

    all_ranks = False
    writes_local_shards = False
    receives_local_shards = False
    front_to_back = False
    own_parts_nbytes = 0
    samples: list[Sample]

    @abstractmethod
    def create(self, plan: SavePlan, place: Any) -> dict[str, FileIdentity]:
        """Make the planned files, with their headers, where that must be done before ranks write. Runs on: rank 0.

        Args:
            place: What the target of the save gives to its writers (commit/target.py), such as the staging folder.

        Returns:
            What proves to all ranks that they have the same files, by name.
        """

    @abstractmethod
    def open(self, plan: SavePlan, place: Any, made: Mapping[str, FileIdentity]) -> None:
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
    def look(self, samples: Iterable[Sample]) -> None:
        """After all ranks have finished, look for what others have written.

        Raises:
            IncompleteError: It is not there.
            TargetError: A file is not the one that rank 0 made.
            OSError: A file cannot be read.
        """

    def read_back(self) -> None:  # noqa: B027
        """Compare all that this rank has written with what is read, unless the commit does that (``verify='full'``).

        Raises:
            IncompleteError: It is not what was written.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drop what is pending, close the files and end the threads. Never raises."""
