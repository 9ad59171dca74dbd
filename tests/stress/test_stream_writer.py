"""The writer's bytes, its bound on memory, and what an error of the disk does."""

import errno
import os
import random
import threading
import time
import weakref
from pathlib import Path

import pytest

from tests.helpers.runs.tallies import plan_of
from xhf_hooks.files.writer import Writer
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.types import Chunk, Placement


def opened_writer(plan: SavePlan, folder: Path, pending_nbytes: int) -> Writer:
    writer = Writer(pending_nbytes).start()
    writer.open(plan, folder, writer.create(plan, folder))
    return writer


class Buffer(bytearray):
    """Chunk memory that can be watched: plain bytearrays take no weak reference."""


def chunk_of(placement: Placement, value: int = 1) -> Chunk:
    return Chunk(placement, memoryview(Buffer(bytes([value]) * placement.nbytes)))


def assert_at_rest(writer: Writer, folder: Path) -> None:
    writer.abort()  # as a save calls it at its end, whatever happened; it must do no harm
    writer.close()
    links = [os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')]
    assert [link for link in links if link.startswith(f'{folder}/')] == []


def test_bytes_are_right_in_any_order_and_those_that_wait_never_exceed_the_limit(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, 'pwrite', lambda *args: (time.sleep(0.002), pwrite(*args))[1])
    plan = plan_of(*[30] * 40, 150, 0)
    writer = opened_writer(plan, tmp_path, pending_nbytes=100)
    placements = list(enumerate(plan.placements))
    random.Random(0).shuffle(placements)
    buffers, peaks = [], []
    for number, placement in placements:
        chunk = chunk_of(placement, number)
        buffers.append(weakref.ref(chunk.data.obj))
        writer.write(chunk)
        del chunk
        peaks.append(sum(len(buffer) for ref in buffers if (buffer := ref()) is not None))
    assert {t.placement for t in writer.finish().written()} == set(plan.placements)
    for number, placement in placements:
        data = (tmp_path / placement.file).read_bytes()
        assert data[placement.offset : placement.offset + placement.nbytes] == bytes([number]) * placement.nbytes
    assert max(peaks) <= 150, 'more than the largest'
    assert sorted(peaks)[-10] >= 60, 'nothing was ever pending: the writer does not work beside the gathering'
    assert_at_rest(writer, tmp_path)


def test_nothing_waits_for_ever_behind_an_error(tmp_path, monkeypatch):
    plan = plan_of(200, 60)
    writer = opened_writer(plan, tmp_path, pending_nbytes=1)
    one_waits = threading.Event()

    def fail(*args):
        one_waits.wait()
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, 'pwrite', fail)
    writer.write(chunk_of(plan.placements[0]))
    threading.Timer(0.2, one_waits.set).start()
    with pytest.raises(OSError, match='No space left'):
        writer.write(chunk_of(plan.placements[1]))
    writer.abort()
    assert_at_rest(writer, tmp_path)
