"""Where committed saves go: a folder on a file system, or a prefix in an object store."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from xhf_hooks.concurrency.thread_pool import WorkerThreads
from xhf_hooks.planning.types import SavePlan, Step, WrittenTensor


class SaveTarget(ABC):
    """The newest committed save under one name, and the older ones beside it.

    All ranks call :meth:`connect`, :meth:`place` and :meth:`name_of`; rank 0 calls the rest: :meth:`claim` before
    training, for each save :meth:`open_staging`, and :meth:`commit` or :meth:`abandon`; :meth:`release` at the end.

    Attributes:
        final: What the user knows it by; of two targets, equal only if they are one.
        max_keep: How many saves are kept, the newest included; -1 keeps all.
        fsync: Whether what is written is flushed before the commit.
        warnings: Of the last commit or recovery, for the log; :meth:`open_staging` clears them.
    """

    final: Any
    max_keep: int
    fsync: bool = True
    warnings: list[str]

    def __init__(self, final: Any, max_keep: int) -> None:
        self.final, self.max_keep = final, max_keep
        self.warnings = []
        self._run_id = uuid.uuid4().hex

    def connect(self) -> None:  # noqa: B027
        """Before training, see that this rank can write there, where each has a way of its own.

        Runs on: all ranks but 0, which claims.

        Raises:
            TargetError: It cannot.
        """

    @abstractmethod
    def claim(self) -> None:
        """Before training: see that saves can be written there, keep other runs out, clean up after killed ones.

        Raises:
            TargetError: It cannot be used.
        """

    @abstractmethod
    def release(self) -> None:
        """Let another run use it. Does nothing where it is not claimed."""

    @property
    def name(self) -> str:
        """The last part of what the user knows it by, such as ``hf_model_best``."""
        return str(self.final).rpartition('/')[2]

    def release_forgotten(self) -> None:
        """:meth:`release` by the garbage collector, in the middle of anything: returns at once."""
        self.release()

    @abstractmethod
    def open_staging(self, step: Step | None = None) -> Path:
        """Begin a save, or a rehearsal that ends with :meth:`abandon`.

        Args:
            step: Of the save.

        Returns:
            An empty folder for the files around the weights.
        """

    @property
    @abstractmethod
    def token(self) -> str:
        """Tells other ranks which save has begun."""

    @abstractmethod
    def place(self, token: str) -> Any:
        """What writers write to. Runs on: any rank."""

    @abstractmethod
    def name_of(self, token: str) -> Path | str:
        """What that save is found by when it is committed. Runs on: any rank."""

    @abstractmethod
    def beside(self, suffix: str) -> SaveTarget:
        """Another one for a single save, its name with a suffix, as of the best save."""

    @abstractmethod
    def free_nbytes(self) -> int | None:
        """Free bytes there; None where there is no such number."""

    @abstractmethod
    def require_room(self, nbytes: int) -> int | None:
        """The same.

        Raises:
            TargetError: Fewer than ``nbytes``.
        """

    @abstractmethod
    def commit(
        self,
        plan: SavePlan,
        records: np.ndarray,
        step: Step,
        facts: dict[str, Any],
        verify: str = 'sizes',
        threads: WorkerThreads | None = None,
    ) -> list[WrittenTensor]:
        """Check that the save is complete and make it the newest; only then delete older ones.

        Args:
            records: What all ranks have written (receipts.py).
            verify: One of VERIFY_LEVELS; with 'full', all bytes are read back and compared with the checksums taken
                from memory.
            threads: For reading back; None starts some.

        Raises:
            IncompleteError: Something planned is missing.
            OSError: It was refused; the previous save is still the newest.
        """

    def _numbered(self, facts: dict[str, Any], number: int) -> dict[str, Any]:
        """For the manifest of the commit of that number."""
        return {**facts, 'commit': {'number': number, 'run': self._run_id}}

    @abstractmethod
    def abandon(self) -> None:
        """Remove what a save that will not be committed has written. Never raises."""


def write_indexes(plan: SavePlan, folder: Path) -> None:
    """Which shard has which tensors, where a save has several."""
    for name, index in plan.indexes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(index, indent=2, sort_keys=True) + '\n', encoding='utf-8')
