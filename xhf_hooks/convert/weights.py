"""Writes the weights of a plan in several threads: read, cast, write; or compares them with what was written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from xhf_hooks.concurrency.thread_pool import WorkerThreads
from xhf_hooks.format.checksum import crc32
from xhf_hooks.format.dtypes import host_bytes
from xhf_hooks.format.nonfinite import count_non_finite
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.planning.types import Group, Placement, SavePlan
from xhf_hooks.sources.file_source import FileSource
from xhf_hooks.sources.gather import group_chunks
from xhf_hooks.telemetry.memory import MemoryMeter
from xhf_hooks.writers.file_io.blocks import BLOCK_NBYTES, Block, BlockFile, Part, cut_into_blocks
from xhf_hooks.writers.tally import Tally

#: Most bytes that gathered groups hold in memory at once; a larger group runs alone.
_GROUPS_NBYTES = 64 * 10**6

#: Arguments of :meth:`Tally.add`, and the number of finite elements that became infinite.
_Result = tuple[list[tuple[Placement, int, int, int, int]], int]


def write_weights(
    staging: Path,
    plan: SavePlan,
    source: FileSource,
    *,
    use_fp32_master: bool,
    workers: int,
    verify: bool,
    meter: MemoryMeter,
    on_progress: Callable[[int, int], None],
) -> tuple[Tally, int]:
    """Write and flush every file of the plan.

    Args:
        workers: Threads.
        verify: Afterwards, compute every byte again and compare it with the disk.
        on_progress: Called in this thread with bytes done and total bytes.

    Returns:
        What was written, and the number of finite elements that became infinite.

    Raises:
        IncompleteError: The disk returned different bytes.
        XhfError, OSError: Reading or writing failed.
    """
    total = sum(placement.nbytes for placement in plan.placements) * (1 + verify)
    done = 0

    def walk(*, verifying: bool) -> tuple[Tally, int]:
        nonlocal done
        tally, overflows = Tally(plan), 0
        work = _Work(source, plan, files, use_fp32_master=use_fp32_master, verifying=verifying, meter=meter)
        with one_torch_thread(), WorkerThreads(workers) as threads:
            for job_made, job_overflows in threads.run(work.jobs()):
                meter.sample()
                for one in job_made:
                    tally.add(*one)
                    done += one[2]
                overflows += job_overflows
                on_progress(done, total)
        return tally, overflows

    with ExitStack() as opened:
        files: dict[str, BlockFile] = {}
        for planned in plan.files:
            files[planned.name] = BlockFile(staging / planned.name, planned.nbytes)
            opened.callback(files[planned.name].close)
        result = walk(verifying=False)
        for file in files.values():
            file.finish(fsync=True)
        if verify:
            for file in files.values():
                file.drop_cache()
            walk(verifying=True)
    return result


class _Work:
    """The jobs of the threads."""

    def __init__(
        self,
        source: FileSource,
        plan: SavePlan,
        files: dict[str, BlockFile],
        *,
        use_fp32_master: bool,
        verifying: bool,
        meter: MemoryMeter,
    ) -> None:
        self._source, self._plan, self._files = source, plan, files
        self._use_fp32_master, self._verifying, self._meter = use_fp32_master, verifying, meter
        self._headers = {file.name: file.header for file in plan.files}
        self._own = threading.local()
        self._budget = _Budget(_GROUPS_NBYTES)

    def jobs(self) -> Iterator[Callable[[], _Result]]:
        """All jobs, the longest first."""
        yield from (partial(self._make_group, group) for group in self._plan.gathered)
        yield from (partial(self._make_block, block) for block in cut_into_blocks(self._plan))

    def _make_block(self, block: Block) -> _Result:
        buffer = self._buffer()
        made = []
        overflows = 0
        for part in block.parts:
            out = buffer[part.start - block.start : part.end - block.start]
            if part.placement is None:
                out[:] = self._headers[block.file][part.start : part.end]
                continue
            overflows += read_part(self._source, part, out, use_fp32_master=self._use_fp32_master)
            made.append(_entry(part.placement, part.start - part.placement.offset, out))
        file = self._files[block.file]
        if self._verifying:
            file.require_block(block, buffer)
        else:
            file.write_block(block, buffer)
        return made, overflows

    def _make_group(self, group: Group) -> _Result:
        names = [spec.name for spec in group.reads]
        made = []
        overflows = 0
        with (
            self._budget.taken(group.read_nbytes),
            self._source.gathered(names, wanted=names, use_fp32_master=self._use_fp32_master) as tensors,
            torch.no_grad(),
        ):
            for chunk in group_chunks(group, tensors, 0, host_bytes, self._meter):
                file = self._files[chunk.placement.file]
                if self._verifying:
                    file.require(chunk.placement.offset, chunk.data)
                else:
                    file.write(chunk.placement.offset, chunk.data)
                made.append(_entry(chunk.placement, 0, chunk.data))
                overflows += chunk.overflows
        return made, overflows

    def _buffer(self) -> memoryview:
        """This thread's buffer of one block."""
        if not hasattr(self._own, 'buffer'):
            self._own.buffer = memoryview(bytearray(BLOCK_NBYTES))
        return self._own.buffer


def read_part(source: FileSource, part: Part, out: memoryview, *, use_fp32_master: bool) -> int:
    """Read and cast one part of a block; returns how many finite elements became infinite."""
    place = part.placement
    first = place.source_offset + (part.start - place.offset) // DTYPE_NBYTES[place.dtype]
    return source.read_into(part.read, first, out, place.dtype, use_fp32_master=use_fp32_master)


def _entry(place: Placement, start: int, data: memoryview) -> tuple[Placement, int, int, int, int]:
    return place, start, data.nbytes, crc32(data), count_non_finite(data, place.dtype)


class _Budget:
    """A limit of bytes in use; a request above the limit waits until nothing else is in use."""

    def __init__(self, nbytes: int) -> None:
        self._limit, self._used, self._changed = nbytes, 0, threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + nbytes <= self._limit)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limit torch to one thread: the workers provide the parallelism."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
