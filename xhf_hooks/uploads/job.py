"""The upload of one save, and the interface of destinations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from xhf_hooks.commit.kept_folder import KeptFolder
from xhf_hooks.errors import DamagedError
from xhf_hooks.integrity.manifest import MANIFEST_NAME, Manifest, read_manifest
from xhf_hooks.planning.types import Step
from xhf_hooks.stores.senders import Senders
from xhf_hooks.uploads.sharing import share_out


@dataclass(eq=False)
class UploadJob:
    """What this rank does for the upload of one save.

    Attributes:
        number: Number of the save, the same on all ranks; later saves have larger numbers.
        name: Name of its folder, such as ``hf_model``.
        place: Its name at the destination, such as ``hf_model_iter_500``.
        folder: Holds its files until everything is uploaded.
        rank: This rank. Rank 0 publishes what all ranks have uploaded.
        n_ranks: Number of ranks that share the files.
        kept: On rank 0, the kept folder to release at the end.
        is_wanted: False once the upload is cancelled.
        is_failing: Whether the last attempt failed.
    """

    number: int
    name: str
    place: str
    step: Step
    folder: Path
    rank: int
    n_ranks: int
    kept: KeptFolder | None = field(default=None, repr=False)
    is_wanted: bool = True
    is_failing: bool = False

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the save, read by the upload thread."""
        found = read_manifest(self.folder)
        if found is None:
            raise DamagedError(f'{self.folder}: {MANIFEST_NAME} is missing from the folder that is kept for the upload')
        return found

    @cached_property
    def share(self) -> list[str]:
        """The files that this rank uploads."""
        return share_out({name: file.nbytes for name, file in self.manifest.files.items()}, self.n_ranks)[self.rank]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.manifest.files.values())


@dataclass(frozen=True)
class Means:
    """What the upload thread sends with.

    Attributes:
        room: Room for parts in memory.
    """

    senders: Senders
    room: threading.Semaphore
    is_wanted: Callable[[], bool]


class Destination(Protocol):
    """Where saves of one name are uploaded. Methods raise StoreError if a request fails, and may be called again."""

    where: str
    #: Whether ranks share the files of a save.
    takes_from_all_ranks: bool

    def claim(self) -> None:
        """Check before training that uploads will work. Runs on: rank 0."""

    def require_usable(self) -> None:
        """Check before training that uploads will work. Runs on: other ranks that upload."""

    def new_place(self, step: Step) -> str:
        """The name of the next save at the destination. Runs on: rank 0. Sends no request."""

    def send(self, job: UploadJob, names: Sequence[str], means: Means) -> int:
        """Upload files of a save; returns bytes sent."""

    def missing(self, job: UploadJob) -> list[str]:
        """Files of a save that are not there yet. Runs on: rank 0."""

    def publish(self, job: UploadJob) -> None:
        """Make a save visible when all of its files are uploaded. Runs on: rank 0."""

    def abandon(self, job: UploadJob) -> None:
        """Remove what was uploaded of a cancelled save. Runs on: rank 0."""

    def release(self) -> None:
        """Release the destination at the end of the run. Runs on: rank 0."""
