"""Files on their way into a store: in their order, once, whole or not at all."""

from __future__ import annotations

import os
import uuid
import zlib

import pytest

from xhf_hooks.errors import IncompleteError, StoreError
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import Chunk, ExportEntry, TensorSpec
from xhf_hooks.stores import open_store
from xhf_hooks.stores.store import Store
from xhf_hooks.stores.stored_folder import StoredFolder
from xhf_hooks.writers.store import StoreWriter

pytestmark = pytest.mark.modern_only

SIZES = {'a': 3_000_000, 'b': 5, 'c': 1_500_000, 'd': 0}
DATA = {name: os.urandom(nbytes) for name, nbytes in SIZES.items()}


@pytest.fixture
def place():
    return StoredFolder(open_store(f'memory://{uuid.uuid4().hex}'), 'hf_model_iter_1')


@pytest.fixture
def plan():
    specs = [TensorSpec(name, (nbytes,), 'U8') for name, nbytes in SIZES.items()]
    entries = [ExportEntry(spec.name, spec.shape, 'U8', (spec.name,)) for spec in specs]
    return make_plan(entries, specs, max_shard_nbytes=4_000_000, bucket_nbytes=1, front_to_back=True)


@pytest.fixture
def writer(plan, place):
    made = StoreWriter(pending_nbytes=10**6)
    made.open(plan, place, made.create(plan, place))
    yield made
    made.abort()


def chunks(plan, order=None):
    places = {place.hf_name: place for place in plan.placements}
    for name in order or places:
        yield Chunk(places[name], memoryview(DATA[name]))


def files(place):
    return {key.removeprefix(place.key('')): place.store.get(key) for key in place.store.list()}


def content(plan, file):
    parts = [DATA[p.hf_name] for p in sorted(plan.placements, key=lambda p: p.offset) if p.file == file.name]
    return b''.join([file.header, *parts])


@pytest.mark.parametrize('turned', [False, True])
def test_files_have_their_bytes_whatever_comes_early(plan, place, writer, turned):
    in_order = [p.hf_name for p in plan.placements]
    for chunk in chunks(plan, in_order[::-1] if turned else in_order):
        writer.write(chunk)
    tensors = writer.finish().written()
    assert files(place) == {file.name: content(plan, file) for file in plan.files}
    assert len(plan.files) > 1 and {t.placement.hf_name: t.crc32 for t in tensors} == {
        name: zlib.crc32(data) for name, data in DATA.items()
    }
    writer.look(writer.samples)
    writer.read_back()


def test_what_is_missing_is_told_and_not_visible(plan, place, writer):
    names = [p.hf_name for p in plan.placements if p.nbytes]
    for chunk in chunks(plan, names[1:]):
        writer.write(chunk)
    with pytest.raises(IncompleteError, match=r'hf_model_iter_1/model-.*: expected \d+ bytes, only \d+ were sent'):
        writer.finish()
    writer.abort()
    lacking = next(p.file for p in plan.placements if p.hf_name == names[0])
    assert lacking not in files(place)


def test_bytes_that_come_twice_are_refused(plan, place, writer):
    first = next(chunks(plan))
    writer.write(first)
    with pytest.raises(IncompleteError, match='arrived after those up to'):
        for _ in range(100):
            writer.write(first)
        writer.finish()


def test_other_bytes_in_the_store_are_found(plan, place, writer):
    for chunk in chunks(plan):
        writer.write(chunk)
    writer.finish()
    key = place.key(plan.files[0].name)
    data = bytearray(place.store.get(key))
    data[-1] ^= 1
    place.store.put(key, bytes(data))
    with pytest.raises(IncompleteError, match='read back, its CRC-32 is'):
        writer.read_back()
    place.store.put(key, bytes(len(data)))
    with pytest.raises(IncompleteError, match='differ from those that were sent and acknowledged'):
        writer.look(writer.samples)


def test_an_error_of_the_store_ends_the_save(plan, place, writer, monkeypatch):
    def refuse(*args):
        raise StoreError('SlowDown')

    monkeypatch.setattr(Store, '_parts', refuse)
    with pytest.raises(StoreError, match='SlowDown'):
        for chunk in chunks(plan):
            writer.write(chunk)
        writer.finish()
    writer.abort()
    assert files(place) == {}


def test_a_rank_that_owns_nothing_writes_nothing(plan, place, monkeypatch):
    monkeypatch.setattr('xhf_hooks.writers.store.rank_and_world_size', lambda: (1, 2))
    writer = StoreWriter(1)
    writer.open(plan, place, {})
    assert not writer.finish().numbers.any() and files(place) == {}
    writer.abort()
