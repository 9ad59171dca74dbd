"""Every rank sends the files that it owns to an object store, from memory, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from xhf_hooks.concurrency.low_priority import lower_priority
from xhf_hooks.distributed.collective import rank_and_world_size
from xhf_hooks.errors import IncompleteError
from xhf_hooks.format.checksum import crc32
from xhf_hooks.planning.types import SavePlan
from xhf_hooks.stores.senders import Senders
from xhf_hooks.stores.store import PART_NBYTES
from xhf_hooks.stores.stored_folder import StoredFolder
from xhf_hooks.stores.stored_object import PARTS_IN_MEMORY
from xhf_hooks.writers.evidence import Sample
from xhf_hooks.writers.file_io.file_in_store import FileInStore
from xhf_hooks.writers.output_file import FileIdentity
from xhf_hooks.writers.tally import Tally
from xhf_hooks.writers.writer import Writer


class StoreWriter(Writer):
    """Each file is one object, which its owner sends from the first byte to the last. Used if ``out_dir`` is a URL."""

    #: Memory for parts, in addition to waiting chunks.
    own_parts_nbytes = PARTS_IN_MEMORY * PART_NBYTES

    def __init__(self, pending_nbytes: int, fsync: bool = True, *, beside_training: bool = False) -> None:
        super().__init__(pending_nbytes, fsync, beside_training=beside_training)
        self._senders = Senders(PARTS_IN_MEMORY, lower_priority if beside_training else lambda: None)

    def create(self, plan: SavePlan, place: StoredFolder) -> dict[str, FileIdentity]:  # type: ignore[override]
        return {}  # the owner creates the object when it sends it

    def open(  # type: ignore[override]
        self, plan: SavePlan, place: StoredFolder, made: Mapping[str, FileIdentity]
    ) -> None:
        rank = rank_and_world_size()[0]
        own = {placement.file for placement in plan.placements if placement.owner == rank}
        self._place, self._tally = place, Tally(plan)
        self._planned = {file.name: file for file in plan.files if file.name in own}
        self._sums: dict[str, int] = {}

    def look(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self._place.require(sample.file, sample.start, sample.data)

    def read_back(self, on_read: Callable[[int], None] = lambda nbytes: None) -> None:
        """Compare everything that this rank sent with what the store returns.

        Args:
            on_read: Called with the size of each part that was read, in bytes.

        Raises:
            IncompleteError: The store returned different bytes.
        """
        for name, expected in self._sums.items():
            found = 0
            for start in range(0, self._planned[name].nbytes, PART_NBYTES):
                data = memoryview(self._place.read(name, start, PART_NBYTES))
                found = crc32(data, found)
                on_read(data.nbytes)
            if found != expected:
                raise IncompleteError(
                    f'{self._place.url_of(name)}: read back, its CRC-32 is {found:08x}; expected '
                    f'{expected:08x}, as sent. Something changes objects there; set {self._place.store.option} to '
                    f'another place'
                )

    def abort(self) -> None:
        super().abort()
        self._senders.close()

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = FileInStore(self._place, self._planned[name], self._senders)
        return self._files[name]

    def _flush(self) -> None:
        for name in self._planned:
            self._sums[name] = self._file(name).require_whole()
