"""Where committed saves go: a folder on a file system, or a prefix in an object store."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from xhf_hooks.integrity.manifest import FileRecord
from xhf_hooks.planning.types import SavePlan, Step, WrittenTensor
from xhf_hooks.threads import WorkerThreads


class SaveTarget(ABC):
    """The newest committed save under one name, and the older ones beside it.

    All ranks call :meth:`connect`, :meth:`place` and :meth:`name_of`; rank 0 calls the rest: :meth:`claim` before
    training, for each save :meth:`open_staging`, and :meth:`commit` or :meth:`abandon`; :meth:`release` at the end.

    Attributes:
        final: The path or URL of the newest save. Two targets with the same one are the same.
        max_keep: How many saves to keep, including the newest; -1 keeps all.
        fsync: Whether files are flushed to the disk before the commit.
        warnings: Warnings of the last commit or recovery, for the log; :meth:`open_staging` clears them.
    """

    final: Any
    max_keep: int
    fsync: bool = True
    warnings: list[str]
    #: Whether all ranks write into one folder. Otherwise each writes files into a folder of its own, and uploads them.
    is_shared: bool = True

    def __init__(self, final: Any, max_keep: int) -> None:
        self.final, self.max_keep = final, max_keep
        self.warnings = []
        self._run_id = uuid.uuid4().hex

    def connect(self) -> None:  # noqa: B027
        """Check before training that this rank can write there, if each rank has its own connection.

        Runs on: all ranks but rank 0, which calls :meth:`claim`.

        Raises:
            TargetError: This rank cannot write there.
        """

    @abstractmethod
    def claim(self) -> None:
        """Before training: check that saves can be written there, lock it, and clean up after killed runs.

        Raises:
            TargetError: The target cannot be used.
        """

    @abstractmethod
    def release(self) -> None:
        """Release the lock, so that another run can use the target. Does nothing if it is not claimed."""

    @property
    def name(self) -> str:
        """The last component of :attr:`final`, such as ``hf_model_best``."""
        return str(self.final).rpartition('/')[2]

    def release_forgotten(self) -> None:
        """Like :meth:`release`, but called by the garbage collector, at any moment. Returns at once."""
        self.release()

    @abstractmethod
    def open_staging(self, step: Step | None = None) -> Path:
        """Begin a save, or a trial run that ends with :meth:`abandon`.

        Args:
            step: The step of the save; None for a trial run.

        Returns:
            An empty folder for the files beside the weights.
        """

    @property
    @abstractmethod
    def token(self) -> str:
        """Identifies the current save to other ranks."""

    @abstractmethod
    def place(self, token: str) -> Any:
        """Where writers write the save with this token. Runs on: any rank."""

    @abstractmethod
    def name_of(self, token: str) -> Path | str:
        """The path or URL of that save after its commit. Runs on: any rank."""

    @abstractmethod
    def beside(self, suffix: str) -> SaveTarget:
        """Another target, with a suffix added to its name, for a single save such as the best one."""

    @abstractmethod
    def free_nbytes(self) -> int | None:
        """Free bytes there; None if unknown, as for stores."""

    @abstractmethod
    def require_room(self, nbytes: int) -> int | None:
        """Check the free space; returns it as :meth:`free_nbytes` does.

        Raises:
            TargetError: Fewer than ``nbytes`` bytes are free.
        """

    def begin_upload(
        self, plan: SavePlan, tensors: Sequence[WrittenTensor], step: Step, facts: dict[str, Any]
    ) -> tuple[str, dict[str, FileRecord]]:
        """If the target is a store, begin a save there when all files are written.

        Returns:
            What all ranks pass to :meth:`upload`: the save's prefix and its files.
        """
        raise NotImplementedError

    def upload(self, begun: tuple[str, dict[str, FileRecord]], names: Collection[str], verify: str) -> None:
        """Upload files from this rank's folder. Runs on: all ranks.

        Args:
            verify: With 'full', read them back.

        Raises:
            StoreError: A file was not stored.
            IncompleteError: The store returned different bytes.
        """
        raise NotImplementedError

    def end_save(self) -> None:  # noqa: B027
        """Remove this rank's own folder, if it has one. Runs on: all ranks, at the end of each save."""

    @abstractmethod
    def commit(
        self,
        plan: SavePlan,
        tensors: Sequence[WrittenTensor],
        step: Step,
        facts: dict[str, Any],
        verify: str = 'sizes',
        threads: WorkerThreads | None = None,
    ) -> None:
        """Check that the save is complete, make it the newest, and only then delete older ones.

        Args:
            tensors: What all ranks have written.
            verify: One of VERIFY_LEVELS. With 'full', every byte is read back and compared with the checksums taken
                from memory.
            threads: Threads for reading back; None starts some.

        Raises:
            IncompleteError: Something that was planned is missing.
            OSError: The file system or the store reported an error; the previous save is still the newest.
        """

    def _numbered(self, facts: dict[str, Any], number: int) -> dict[str, Any]:
        """The facts for the manifest, with the number of the commit."""
        return {**facts, 'commit': {'number': number, 'run': self._run_id}}

    @abstractmethod
    def abandon(self) -> None:
        """Remove what was written of a save that will not be committed. Never raises."""


def write_indexes(plan: SavePlan, folder: Path) -> None:
    """Write the index files, which list the shard of each tensor. A save in a single file has none."""
    for name, index in plan.indexes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(index, indent=2, sort_keys=True) + '\n', encoding='utf-8')
