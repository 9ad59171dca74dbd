"""The interface of writers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from xhf_hooks.planning.types import Chunk, SavePlan
from xhf_hooks.writers.evidence import Sample
from xhf_hooks.writers.file_io.output_file import FileIdentity
from xhf_hooks.writers.tally import Tally


class Writer(ABC):
    """Writes chunks to their places in the planned files.

    A save calls :meth:`create` on rank 0 and broadcasts the result. Then it calls on each rank :meth:`open`,
    :meth:`write` any number of times, and :meth:`finish`. It calls :meth:`abort` at the end, or at any earlier point.
    The constructor starts the threads, since none can be started once the interpreter is shutting down. It takes the
    arguments of :class:`~xhf_hooks.writers.stream.StreamWriter`.

    Attributes:
        all_ranks: Every rank writes, so all ranks must see the folder.
        writes_local_shards: Every rank writes its own slices where possible, into all files; only the rest is gathered.
            If False, each file has one writer.
        receives_local_shards: Every rank sends its own slices where possible to the rank that writes the tensor; only
            the rest is gathered.
        front_to_back: The writer cannot seek, so the plan must deliver each file from its first byte to its last.
        own_parts_nbytes: Memory that the writer needs in addition to waiting chunks.
        samples: After :meth:`finish`, a few bytes that this rank has written into each file.
    """

    all_ranks = False
    writes_local_shards = False
    receives_local_shards = False
    front_to_back = False
    own_parts_nbytes = 0
    samples: list[Sample]

    @abstractmethod
    def create(self, plan: SavePlan, place: Any) -> dict[str, FileIdentity]:
        """Create the planned files with their headers, if that must precede the writes. Runs on: rank 0.

        Args:
            place: Where the target lets writers write (commit/target.py), such as the staging folder.

        Returns:
            File name to identity, with which other ranks check that they open the same files.
        """

    @abstractmethod
    def open(self, plan: SavePlan, place: Any, made: Mapping[str, FileIdentity]) -> None:
        """Prepare to write into the created files."""

    @abstractmethod
    def write(self, chunk: Chunk) -> None:
        """Accept a chunk. May wait for free memory first, and may return before the chunk is on disk.

        Raises:
            OSError: This or an earlier chunk could not be written.
        """

    @abstractmethod
    def finish(self) -> Tally:
        """Wait for all chunks and close the files; returns what this rank has written.

        Raises:
            OSError: A chunk could not be written.
            TargetError: A file is not the one that rank 0 made.
        """

    @abstractmethod
    def look(self, samples: Iterable[Sample]) -> None:
        """Check, after all ranks have finished, that samples of other ranks' writes are in the files.

        Raises:
            IncompleteError: A sample is missing.
            TargetError: A file is not the one that rank 0 made.
            OSError: A file cannot be read.
        """

    def read_back(self) -> None:  # noqa: B027
        """Read back and compare all that this rank has written, unless the commit does that (``verify='full'``).

        Raises:
            IncompleteError: The bytes differ from those that were written.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drop pending chunks, close the files and end the threads. Never raises."""
