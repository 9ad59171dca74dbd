"""One save on its way to where it is uploaded."""

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
from xhf_hooks.uploads.bandwidth import Bandwidth
from xhf_hooks.uploads.sharing import share_out


@dataclass(eq=False)
class UploadJob:
    """What this rank does for the upload of one save.

    Attributes:
        number: Of the save, the same on all ranks; larger for later ones.
        name: Of its folder, such as ``hf_model``.
        place: Its name where it goes, such as ``hf_model_iter_500``.
        folder: Holds its files until all is uploaded.
        rank: 0 publishes what all ranks have uploaded.
        n_ranks: How many share the files.
        kept: On rank 0: what to release at the end.
        is_wanted: False once it is given up.
        is_failing: The last attempt at something failed.
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
        """Of the save. Read by the thread of uploads."""
        found = read_manifest(self.folder)
        if found is None:
            raise DamagedError(f'{self.folder}: {MANIFEST_NAME} has gone, although this folder is kept for the upload')
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
    """What the thread of uploads sends with.

    Attributes:
        room: For the parts that are in memory.
    """

    senders: Senders
    room: threading.Semaphore
    bandwidth: Bandwidth
    is_wanted: Callable[[], bool]


class Destination(Protocol):
    """Where the saves of one name go. Methods raise StoreError where the place refuses; any may be called again."""

    where: str
    #: Ranks may share the files of a save out.
    takes_from_all_ranks: bool

    def claim(self) -> None:
        """Before training, on rank 0: prove that uploads will work."""

    def require_usable(self) -> None:
        """Before training, on other ranks that upload."""

    def new_place(self, step: Step) -> str:
        """Where the next save goes. Runs on: rank 0; asks nobody."""

    def send(self, job: UploadJob, names: Sequence[str], means: Means) -> int:
        """Upload files of a save; returns bytes sent."""

    def missing(self, job: UploadJob) -> list[str]:
        """Files of a save that are not there yet. Runs on: rank 0."""

    def publish(self, job: UploadJob) -> None:
        """All files are there: make the save visible. Runs on: rank 0."""

    def abandon(self, job: UploadJob) -> None:
        """Remove what is there of a save that was given up. Runs on: rank 0."""

    def release(self) -> None:
        """The run ends. Runs on: rank 0."""
