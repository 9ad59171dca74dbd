"""The tensors of a planned conversion, for the conversion and for ``xhf-verify``; and several threads write them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from xhf_hooks.files.output_file import OutputFile, create_file
from xhf_hooks.files.tally import Tally
from xhf_hooks.files.writer import cuts
from xhf_hooks.format.checksum import count_non_finite, crc32
from xhf_hooks.format.dtypes import TORCH_DTYPES, host_bytes
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.types import CopiedTensor, Group, Placement
from xhf_hooks.sources.copied import chunks_of
from xhf_hooks.sources.host_memory import MemoryMeter
from xhf_hooks.sources.read import made_from
from xhf_hooks.sources.stored_tensors import StoredTensor
from xhf_hooks.system.library_settings import one_torch_thread
from xhf_hooks.system.threads import WorkerThreads

#: Bytes that a thread reads, casts and writes at once.
PART_NBYTES = 4 * 2**20
#: What a job has written, as :meth:`Tally.add` takes it: placement, start, bytes, checksum, values that are not finite.
_Written = tuple[Placement, int, int, int, int]


class PlannedOutputs:
    """A plan, and the stored tensors that it reads. Used by: several threads.

    Args:
        tensors: By the names in the plan.
    """

    def __init__(self, plan: SavePlan, tensors: Mapping[str, StoredTensor]) -> None:
        self.plan = plan
        self._tensors = tensors

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read from the checkpoint."""
        return sum(self._tensors[spec.name].read_nbytes(spec.from_master) for spec in self.plan.reads)

    def read_into(self, group: Group, placement: Placement, start: int, out: torch.Tensor) -> None:
        """Cast elements of an output of a group of ``plan.in_place`` into ``out``, from ``start`` on."""
        (spec,) = group.reads
        self._tensors[spec.name].read_into(placement.source_range.start + start, out, from_master=spec.from_master)

    def make(self, group: Group) -> Iterator[tuple[Placement, torch.Tensor]]:
        """The outputs of a group of ``plan.gathered``, whole."""
        with torch.no_grad():
            tensors = {spec.name: self._tensors[spec.name].whole(spec.from_master) for spec in group.reads}
            yield from made_from(group, tensors, 0)


def write_weights(
    staging: Path, outputs: PlannedOutputs, *, workers: int, meter: MemoryMeter, on_progress: Callable[[int, int], None]
) -> Tally:
    """Write and flush every file of the plan; returns what was written.

    Args:
        on_progress: Called in this thread with bytes done and total bytes.

    Raises:
        XhfError, OSError: Reading or writing failed.
    """
    plan = outputs.plan
    placements = plan.placements
    total = sum(placement.nbytes for placement in placements)
    tally, done = Tally(placements), 0
    with ExitStack() as opened:
        files: dict[str, OutputFile] = {}
        for planned in plan.files:
            identity = create_file(staging / planned.name, planned.header, planned.nbytes)
            files[planned.name] = OutputFile.open(staging / planned.name, identity)
            opened.callback(files[planned.name].close)
        with one_torch_thread(), WorkerThreads(workers) as threads:
            for written in threads.run(_jobs(outputs, files, meter)):
                for placement, start, nbytes, crc, non_finite in written:
                    tally.add(placement, start, nbytes, crc, non_finite)
                    done += nbytes
                meter.sample()
                on_progress(done, total)
        for file in files.values():
            file.fsync()
    return tally


class _Buffer(threading.local):
    """Each thread's own memory."""

    def __init__(self) -> None:
        self.bytes = torch.empty(PART_NBYTES, dtype=torch.uint8)


def _jobs(
    outputs: PlannedOutputs, files: Mapping[str, OutputFile], meter: MemoryMeter
) -> Iterator[Callable[[], list[_Written]]]:
    """The jobs of the threads, the longest first: each makes bytes of the plan and writes them."""
    buffer, making = _Buffer(), threading.Lock()

    def write(placement: Placement, start: int, data: memoryview) -> _Written:
        files[placement.file].write(data, placement.offset + start)
        return placement, start, data.nbytes, crc32(data), count_non_finite(data, placement.dtype)

    def write_part(group: Group, placement: Placement, start: int, end: int) -> list[_Written]:
        out = buffer.bytes[: end - start].view(TORCH_DTYPES[placement.dtype])
        outputs.read_into(group, placement, start // out.itemsize, out)
        return [write(placement, start, host_bytes(out))]

    def write_group(group: Group) -> list[_Written]:
        written = []
        with making:  # whole tensors, of one group at a time
            for placement, made in outputs.make(group):
                meter.sample()  # the peak: what was read, what was made from it, and the cast result
                written.append(write(placement, 0, host_bytes(made)))
        return written

    def write_copy(copied: CopiedTensor) -> list[_Written]:
        return [write(copied.placement, chunk.start, chunk.data) for chunk in chunks_of(copied)]

    for copied in outputs.plan.copied:
        yield partial(write_copy, copied)
    for group in outputs.plan.gathered:
        yield partial(write_group, group)
    for group in outputs.plan.in_place:
        for placement in group.placements:
            for start, end in cuts(placement.nbytes, placement.offset, PART_NBYTES):
                yield partial(write_part, group, placement, start, end)
