"""The whole flow of a conversion, on one page; it is that of :mod:`xhf_hooks.save` without ranks.

CheckpointSource        what the files hold               names and shapes, no data
MetaModel                the model that was trained        on the meta device, no data
Exporter.entries()      what goes out, under which names  the hook's own exporters
make_plan()             where each byte will lie
BlockFile          slices are read, cast, written    several threads, one block each
commit()                staging gets the final name
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from xhf_hooks.commit.checkpoint_folder import CheckpointFolder
from xhf_hooks.commit.completeness import warn_of_non_finite
from xhf_hooks.commit.receipts import pack
from xhf_hooks.concurrency.thread_pool import WorkerThreads
from xhf_hooks.errors import TensorError
from xhf_hooks.exporters import Exporter
from xhf_hooks.format.checksum import crc32
from xhf_hooks.format.dtypes import host_bytes, is_float
from xhf_hooks.format.nonfinite import count_non_finite
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import (
    CommittedCheckpoint,
    Group,
    Placement,
    SaveCost,
    SavePlan,
    Step,
    TensorSpec,
    WriteReceipt,
)
from xhf_hooks.sources.file_source import FileSource
from xhf_hooks.sources.gather import group_chunks
from xhf_hooks.telemetry.memory import MemoryMeter
from xhf_hooks.version import package_versions
from xhf_hooks.writers.file_io.blocks import BLOCK_NBYTES, Block, BlockFile, cut_into_blocks

#: Reads of groups that are made together which may be in memory at once; a larger group is there alone.
_GROUPS_NBYTES = 64 * 10**6

_Result = tuple[list[WriteReceipt], int]
_Job = Callable[[], _Result]


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert. The command's options of the same names, parsed.

    Attributes:
        dtype: Safetensors dtype that floats are cast to, once and from the fp32 master weights where there are
            any; None gives the training dtype, bit for bit what the hook saves.
        workers: Threads that read, cast and write.
        verify: Read everything back before the commit, and compare.
        facts: What else the manifest says.
    """

    dtype: str | None = None
    max_shard_nbytes: int = 5 * 10**9
    workers: int = 1
    verify: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


class Converter:
    """Converts one checkpoint. Runs on: one process.

    Args:
        source: Names and specs are those of the model that ``exporter`` was made for.

    Raises:
        ModelError: The model cannot be exported; the reason is in it.
    """

    def __init__(self, source: FileSource, exporter: Exporter, options: ConvertOptions) -> None:
        self._source, self.exporter, self._options = source, exporter, options
        self._use_fp32_master = options.dtype is not None
        specs = source.specs()
        if self._use_fp32_master:
            specs = [replace(spec, dtype='F32') if spec.has_master else spec for spec in specs]
        self.plan: SavePlan = make_plan(
            exporter.entries(specs, options.dtype),
            specs,
            max_shard_nbytes=options.max_shard_nbytes,
            bucket_nbytes=1,
            n_parameters=exporter.n_parameters,
            sliced={spec.name for spec in specs},
        )
        for group in self.plan.sliced:
            for placement in group.placements:
                _require_castable(group.reads[0], placement.dtype)

    @property
    def source(self) -> FileSource:
        """Where the tensors of the plan come from."""
        return self._source

    @property
    def use_fp32_master(self) -> bool:
        """Whether fp32 master weights are read where there are any."""
        return self._use_fp32_master

    @property
    def read_nbytes(self) -> int:
        """Bytes of the checkpoint that a conversion reads."""
        names = {spec.name for group in (*self.plan.sliced, *self.plan.gathered) for spec in group.reads}
        return self._source.stored_nbytes(names, use_fp32_master=self._use_fp32_master)

    def convert(
        self,
        folder: CheckpointFolder,
        step: Step,
        tokenizer: Any | None = None,
        eos_token_ids: tuple[int, ...] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> CommittedCheckpoint:
        """Write and commit.

        Args:
            on_progress: Called in this thread with bytes done and bytes in all (twice the bytes with ``verify``).

        Raises:
            XhfError, OSError: It failed; nothing is left under the final name that was not there before.
        """
        started, meter = time.perf_counter(), MemoryMeter()
        try:
            staging = folder.open_staging()
            folder.require_room(self.plan.nbytes)
            warnings = self.exporter.write_hf_assets(staging, tokenizer, eos_token_ids)
            files: dict[str, BlockFile] = {}
            try:
                for planned in self.plan.files:
                    files[planned.name] = BlockFile(staging / planned.name, planned.nbytes)
                receipts, overflows = self._walk(files, meter, on_progress, verifying=False)
                for file in files.values():
                    file.finish(folder.fsync)
                if self._options.verify:
                    for file in files.values():
                        file.drop_cache()
                    self._walk(files, meter, on_progress, verifying=True)
            finally:
                for file in files.values():
                    file.close()
            facts = {'dtype': self._options.dtype or 'as trained', **self._options.facts}
            tensors = folder.commit(
                self.plan, pack(self.plan, receipts), step, {'packages': package_versions(), **facts}
            )
        except BaseException:  # a signal, too, must leave nothing
            folder.abandon()
            raise
        warnings += warn_of_non_finite(tensors)
        if overflows:
            warnings.append(f'{overflows} finite weights became infinite in {self._options.dtype}')
        seconds = time.perf_counter() - started
        cost = SaveCost(self.plan.nbytes, seconds, seconds, meter.peak_extra_nbytes, overflows)
        return CommittedCheckpoint(folder.final, step, cost, tuple(warnings))

    def _walk(
        self,
        files: dict[str, BlockFile],
        meter: MemoryMeter,
        on_progress: Callable[[int, int], None] | None,
        *,
        verifying: bool,
    ) -> tuple[list[WriteReceipt], int]:
        """Make every byte of every file, and write it, or compare it with what was written.

        Returns:
            What was made, and elements that overflowed.
        """
        nbytes = sum(placement.nbytes for placement in self.plan.placements)
        done, total = (nbytes, 2 * nbytes) if verifying else (0, nbytes * (1 + self._options.verify))
        made: list[WriteReceipt] = []
        overflows = 0
        work = _Work(
            self._source, self.plan, files, use_fp32_master=self._use_fp32_master, verifying=verifying, meter=meter
        )
        with _one_torch_thread(), WorkerThreads(self._options.workers) as threads:
            for job_made, job_overflows in threads.run(self._jobs(work)):
                meter.sample()
                made += job_made
                done += sum(receipt.nbytes for receipt in job_made)
                overflows += job_overflows
                if on_progress is not None:
                    on_progress(done, total)
        return made, overflows

    def _jobs(self, work: _Work) -> Iterator[_Job]:
        for group in self.plan.gathered:  # the longest first
            yield partial(work.group, group)
        for block in cut_into_blocks(self.plan):
            yield partial(work.block, block)


class _Work:
    """What the threads do; each result is what was made, and elements that overflowed."""

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
        self._meter = meter
        self._source, self._files, self._use_fp32_master, self._verifying = source, files, use_fp32_master, verifying
        self._headers = {file.name: file.header for file in plan.files}
        self._own = threading.local()
        self._budget = _Budget(_GROUPS_NBYTES)

    def block(self, block: Block) -> _Result:
        buffer = self._buffer()
        made: list[WriteReceipt] = []
        overflows = 0
        for part in block.parts:
            out = buffer[part.start - block.start : part.end - block.start]
            place = part.placement
            if place is None:
                out[:] = self._headers[block.file][part.start : part.end]
                continue
            first = place.source_offset + (part.start - place.offset) // DTYPE_NBYTES[place.dtype]
            overflows += self._source.read_into(
                part.read, first, out, place.dtype, use_fp32_master=self._use_fp32_master
            )
            made.append(_receipt(place, part.start - place.offset, out))
        file = self._files[block.file]
        if self._verifying:
            file.require_block(block, buffer)
        else:
            file.write_block(block, buffer)
        return made, overflows

    def group(self, group: Group) -> _Result:
        names = [spec.name for spec in group.reads]
        made: list[WriteReceipt] = []
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
                made.append(_receipt(chunk.placement, 0, chunk.data))
                overflows += chunk.overflows
        return made, overflows

    def _buffer(self) -> memoryview:
        """This thread's, for one block."""
        if not hasattr(self._own, 'buffer'):
            self._own.buffer = memoryview(bytearray(BLOCK_NBYTES))
        return self._own.buffer


def _receipt(place: Placement, start: int, data: memoryview) -> WriteReceipt:
    bad = count_non_finite(data, place.dtype)
    return WriteReceipt(place.file, place.hf_name, start, data.nbytes, crc32(data), bad)


class _Budget:
    """Bytes that may be in use at once; who wants more than all of them waits to be alone."""

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
def _one_torch_thread() -> Iterator[None]:
    """Each worker is one thread already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _require_castable(spec: TensorSpec, dtype: str) -> None:
    if spec.dtype != dtype and not (is_float(spec.dtype) and is_float(dtype)):
        raise TensorError(f'{spec.name}: {spec.dtype} cannot be written as {dtype}')
