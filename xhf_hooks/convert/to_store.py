"""Sends the weights of a plan to a store. Several threads read and cast; parts are sent in file order."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from xhf_hooks.concurrency.thread_pool import WorkerThreads
from xhf_hooks.convert.weights import one_torch_thread, read_part
from xhf_hooks.format.dtypes import host_bytes
from xhf_hooks.planning.types import Chunk, Group, SavePlan, WriteReceipt
from xhf_hooks.sources.file_source import FileSource
from xhf_hooks.sources.gather import group_chunks
from xhf_hooks.stores.stored_folder import StoredFolder
from xhf_hooks.telemetry.memory import MemoryMeter
from xhf_hooks.writers.file_io.blocks import BLOCK_NBYTES, Block, cut_into_blocks
from xhf_hooks.writers.store import StoreWriter

#: Bytes done, and finite elements that became infinite.
_Done = tuple[int, int]


def send_weights(
    place: StoredFolder,
    plan: SavePlan,
    source: FileSource,
    *,
    use_fp32_master: bool,
    workers: int,
    verify: bool,
    meter: MemoryMeter,
    on_progress: Callable[[int, int], None],
) -> tuple[list[WriteReceipt], int]:
    """Send every file of the plan, from memory; for arguments and results see :func:`.write_weights`.

    Args:
        verify: Afterwards, read everything back and compare its checksums with those of the sent bytes.

    Raises:
        IncompleteError: The store returned different bytes.
        XhfError, OSError: Reading or sending failed.
    """
    total, n_overflows = plan.nbytes * (1 + verify), 0
    done = sum(len(file.header) for file in plan.files)

    def tell(nbytes: int) -> None:
        nonlocal done
        meter.sample()
        done += nbytes
        on_progress(done, total)

    writer = StoreWriter(workers * BLOCK_NBYTES)
    try:
        writer.open(plan, place, writer.create(plan, place))
        work = _Work(source, plan, writer, use_fp32_master=use_fp32_master, meter=meter)
        with one_torch_thread(), WorkerThreads(workers) as threads:
            for nbytes, overflows in threads.run(work.jobs()):
                tell(nbytes)
                n_overflows += overflows
        receipts = writer.finish()
        writer.look(writer.samples)
        if verify:
            writer.read_back(tell)
    finally:
        writer.abort()
    return receipts, n_overflows


class _Work:
    """The jobs of the threads. They read and cast in parallel, and take turns to hand their bytes to the writer."""

    def __init__(
        self, source: FileSource, plan: SavePlan, writer: StoreWriter, *, use_fp32_master: bool, meter: MemoryMeter
    ) -> None:
        self._source, self._plan, self._writer = source, plan, writer
        self._use_fp32_master, self._meter = use_fp32_master, meter
        self._turns = _Turns()

    def jobs(self) -> Iterator[Callable[[], _Done]]:
        """Jobs in file order. A group with several places comes at the first of them."""
        number_of = {file.name: number for number, file in enumerate(self._plan.files)}

        def first_place(item: Block | Group) -> tuple[int, int]:
            if isinstance(item, Block):
                return number_of[item.file], item.start
            return min((number_of[place.file], place.offset) for place in item.placements)

        items: list[Iterable[Block | Group]] = [
            cut_into_blocks(self._plan),
            sorted(self._plan.gathered, key=first_place),
        ]
        for turn, item in enumerate(heapq.merge(*items, key=first_place)):
            if isinstance(item, Block):
                yield partial(self._send_block, turn, item)
            else:
                yield partial(self._send_group, turn, item)

    def _send_block(self, turn: int, block: Block) -> _Done:
        chunks = []
        with self._turns.failing():
            for part in block.parts:
                if part.placement is None:  # the writer sends headers itself
                    continue
                data = memoryview(bytearray(part.end - part.start))
                overflows = read_part(self._source, part, data, use_fp32_master=self._use_fp32_master)
                chunks.append(Chunk(part.placement, data, part.start - part.placement.offset, overflows))
            return self._hand_over(turn, iter(chunks))

    def _send_group(self, turn: int, group: Group) -> _Done:
        """Read, cast and send only when its turn comes: several groups at once would take too much memory."""
        names = [spec.name for spec in group.reads]

        def chunks() -> Iterator[Chunk]:
            with (
                self._source.gathered(names, wanted=names, use_fp32_master=self._use_fp32_master) as tensors,
                torch.no_grad(),
            ):
                yield from group_chunks(group, tensors, 0, host_bytes, self._meter)

        with self._turns.failing():
            return self._hand_over(turn, chunks())

    def _hand_over(self, turn: int, chunks: Iterator[Chunk]) -> _Done:
        done = overflows = 0
        with self._turns.taken(turn) as may_go_on:
            for chunk in chunks if may_go_on else ():
                done += chunk.data.nbytes
                overflows += chunk.overflows
                self._writer.write(chunk)
        return done, overflows


class _Turns:
    """Lets jobs continue one after the other, in order; none after a job has failed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._has_failed = False

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Wraps a whole job, so that waiting jobs learn of its failure."""
        try:
            yield
        except BaseException:
            with self._changed:
                self._has_failed = True
                self._changed.notify_all()
            raise

    @contextmanager
    def taken(self, number: int) -> Iterator[bool]:
        """Wait for turn ``number`` (from 0); yields False if a job has failed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_failed or self._next == number)
            may_go_on = not self._has_failed
        yield may_go_on
        with self._changed:
            self._next += 1
            self._changed.notify_all()
