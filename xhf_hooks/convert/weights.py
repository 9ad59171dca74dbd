"""Writes the weights of a plan in several threads: read, cast, write."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from xhf_hooks.convert.outputs import PlannedOutputs
from xhf_hooks.format.checksum import count_non_finite, crc32
from xhf_hooks.format.dtypes import TORCH_DTYPES, host_bytes
from xhf_hooks.planning.types import Group, Placement
from xhf_hooks.sources.host_memory import MemoryMeter
from xhf_hooks.system.library_settings import one_torch_thread
from xhf_hooks.system.threads import WorkerThreads
from xhf_hooks.writers.output_file import OutputFile, create_file
from xhf_hooks.writers.tally import Tally
from xhf_hooks.writers.writer import cuts

#: Bytes that a thread reads, casts and writes at once.
PART_NBYTES = 4 * 2**20


def write_weights(
    staging: Path,
    outputs: PlannedOutputs,
    *,
    workers: int,
    meter: MemoryMeter,
    on_progress: Callable[[int, int], None],
) -> Tally:
    """Write and flush every file of the plan; returns what was written.

    Args:
        workers: Threads.
        on_progress: Called in this thread with bytes done and total bytes.

    Raises:
        XhfError, OSError: Reading or writing failed.
    """
    plan = outputs.plan
    total = sum(placement.nbytes for placement in plan.placements)
    with ExitStack() as opened:
        files: dict[str, OutputFile] = {}
        for planned in plan.files:
            identity = create_file(staging / planned.name, planned.header, planned.nbytes)
            files[planned.name] = OutputFile(staging / planned.name, identity)
            opened.callback(files[planned.name].close)
        work = _Work(outputs, files, meter)
        with one_torch_thread(), WorkerThreads(workers) as threads:
            for _ in threads.run(work.jobs()):
                meter.sample()
                on_progress(work.done, total)
        for file in files.values():
            file.fsync()
    return work.tally


class _Work:
    """The jobs of the threads: each makes bytes of the plan and writes them.

    Attributes:
        tally: What was written.
        done: Bytes written.
    """

    def __init__(self, outputs: PlannedOutputs, files: Mapping[str, OutputFile], meter: MemoryMeter) -> None:
        self._outputs, self._files, self._meter = outputs, files, meter
        self.tally, self.done = Tally(outputs.plan), 0
        self._own = threading.local()
        self._counting = threading.Lock()
        self._gathering = threading.Lock()  # whole tensors, of one group at a time

    def jobs(self) -> Iterator[Callable[[], None]]:
        """All jobs, the longest first."""
        plan = self._outputs.plan
        yield from (partial(self._write_group, group) for group in plan.gathered)
        for group in plan.sliced:
            for place in group.placements:
                for start, end in cuts(place.nbytes, place.offset, PART_NBYTES):
                    yield partial(self._write_part, group, place, start, end)

    def _write_part(self, group: Group, place: Placement, start: int, end: int) -> None:
        if not hasattr(self._own, 'buffer'):
            self._own.buffer = torch.empty(PART_NBYTES, dtype=torch.uint8)
        out = self._own.buffer[: end - start].view(TORCH_DTYPES[place.dtype])
        self._outputs.read_into(group, place, start // out.itemsize, out)
        self._write(place, start, host_bytes(out))

    def _write_group(self, group: Group) -> None:
        with self._gathering:
            for found in self._outputs.make(group):
                self._meter.sample()  # the peak: what was read, what was made from it, and the cast result
                self._write(found.placement, 0, found.chunk().data)

    def _write(self, place: Placement, start: int, data: memoryview) -> None:
        self._files[place.file].write(data, place.offset + start)
        crc, non_finite = crc32(data), count_non_finite(data, place.dtype)
        with self._counting:
            self.tally.add(place, start, data.nbytes, crc, non_finite)
            self.done += data.nbytes
