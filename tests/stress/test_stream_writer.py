"""The writer's bytes, its bound on memory, and what an error of the disk does."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
import weakref
from pathlib import Path

import pytest

from tests.helpers.ranks import HANG_SECS
from xhf_hooks.format.safetensors import check_file
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import Chunk, ExportEntry, Placement, SavePlan, TensorSpec
from xhf_hooks.writers.writer import Writer


def plan_of(*sizes: int, shard: int = 10**9) -> SavePlan:
    """One byte tensor per size."""
    specs = [TensorSpec(f'w{i:02}', (size,), 'U8') for i, size in enumerate(sizes)]
    entries = [ExportEntry(spec.name, spec.shape, spec.dtype, (spec.name,)) for spec in specs]
    return make_plan(entries, specs, max_shard_nbytes=shard, bucket_nbytes=1)


def opened_writer(plan: SavePlan, folder: Path, pending_nbytes: int = 10**6) -> Writer:
    writer = Writer(pending_nbytes)
    writer.open(plan, folder, writer.create(plan, folder))
    return writer


class Buffer(bytearray):
    """Chunk memory that can be watched: plain bytearrays take no weak reference."""


class Memory:
    """Makes chunks and knows how many of their bytes are still referred to by anybody."""

    def __init__(self) -> None:
        self.live_nbytes = 0

    def chunk(self, placement: Placement, value: int = 1) -> Chunk:
        buffer = Buffer(bytes([value]) * placement.nbytes)
        self.live_nbytes += placement.nbytes
        weakref.finalize(buffer, self._freed, placement.nbytes)
        return Chunk(placement, memoryview(buffer))

    def _freed(self, nbytes: int) -> None:
        self.live_nbytes -= nbytes

    def wait_until_free(self) -> None:
        deadline = time.monotonic() + HANG_SECS
        while self.live_nbytes and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.live_nbytes == 0


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def gate(monkeypatch):
    """While it is cleared the disk takes nothing; the headers, written by ``open``, are let through."""
    opened = threading.Event()
    opened.set()
    opened.error = None  # raised in place of what waited
    pwrite = os.pwrite

    def slow_pwrite(fd, data, offset):
        if threading.current_thread().name == 'xhf-writer':
            assert opened.wait(HANG_SECS)
            if opened.error:
                raise opened.error
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, 'pwrite', slow_pwrite)
    yield opened
    opened.set()


def open_files(folder: Path) -> list[str]:
    links = []
    for fd in os.listdir('/proc/self/fd'):
        try:
            links.append(os.readlink(f'/proc/self/fd/{fd}'))
        except FileNotFoundError:  # the one that listed the folder
            continue
    return [link for link in links if link.startswith(f'{folder}/')]


def assert_at_rest(folder: Path) -> None:
    assert open_files(folder) == []
    assert 'xhf-writer' not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize('shard', [10**9, 1000])
@pytest.mark.parametrize('pending_nbytes', [1, 700, 10**6])
def test_bytes_are_right_in_any_order(tmp_path, memory, shard, pending_nbytes):
    plan = plan_of(*range(0, 1000, 37), shard=shard)
    writer = opened_writer(plan, tmp_path, pending_nbytes)
    placements = list(enumerate(plan.placements))
    random.Random(0).shuffle(placements)
    for number, placement in placements:
        writer.write(memory.chunk(placement, number))
    tally = writer.finish()
    writer.abort()  # as a save calls it at its end, whatever happened; it must do no harm
    assert {t.placement.hf_name: t.placement.nbytes for t in tally.written()} == {
        p.hf_name: p.nbytes for p in plan.placements
    }
    for file in plan.files:
        check_file(tmp_path / file.name, file.header, file.nbytes)
    for number, placement in placements:
        data = (tmp_path / placement.file).read_bytes()
        assert data[placement.offset : placement.offset + placement.nbytes] == bytes([number]) * placement.nbytes
    assert_at_rest(tmp_path)


# Memory


def test_waiting_bytes_never_exceed_the_limit(tmp_path, memory, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, 'pwrite', lambda *args: (time.sleep(0.002), pwrite(*args))[1])
    plan = plan_of(*[30] * 40)
    writer = opened_writer(plan, tmp_path, pending_nbytes=100)
    peaks = []
    for placement in plan.placements:
        writer.write(memory.chunk(placement))
        peaks.append(memory.live_nbytes)
    writer.finish()
    assert max(peaks) <= 100
    assert max(peaks) >= 60, 'nothing was ever pending: the writer does not work beside the gathering'


# Errors


def test_nothing_waits_for_ever_behind_an_error(tmp_path, memory, gate):
    plan = plan_of(200, 60)
    writer = opened_writer(plan, tmp_path, pending_nbytes=1)
    gate.error = OSError(errno.ENOSPC, 'No space left on device')
    gate.clear()
    writer.write(memory.chunk(plan.placements[0]))
    errors = []

    def write_more() -> None:
        try:
            writer.write(memory.chunk(plan.placements[1]))
        except OSError as error:
            errors.append(error.errno)

    waiting = threading.Thread(target=write_more, daemon=True)
    waiting.start()
    gate.set()
    waiting.join(HANG_SECS)
    assert errors == [errno.ENOSPC]
    writer.abort()


# Giving up


def test_abort_drops_what_is_pending(tmp_path, memory, gate):
    plan = plan_of(*[10] * 50)
    writer = opened_writer(plan, tmp_path)
    gate.clear()
    for placement in plan.placements:
        writer.write(memory.chunk(placement, 7))
    threading.Timer(0.1, gate.set).start()
    writer.abort()
    writer.abort()
    assert_at_rest(tmp_path)
    assert (tmp_path / 'model.safetensors').read_bytes().count(7) < 50 * 10
    memory.wait_until_free()
