"""Any tensors, any number of ranks, any sizes: what is written reads back identical with the safetensors library."""

import itertools
import json
import math
import random
import tempfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.runs.tallies import together
from xhf_hooks.files.writer import PIECE_NBYTES, Writer
from xhf_hooks.format.checksum import count_non_finite
from xhf_hooks.format.dtypes import TORCH_DTYPES, dtype_code, host_bytes
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.plan import WrittenSave
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.spread import Axis, Spread, in_rank_order
from xhf_hooks.planning.types import Chunk, ExportEntry, Step, TensorSpec
from xhf_hooks.planning.write_strategy import WriteStrategy

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
NAMES = st.text(st.characters(exclude_categories=['Cs']), min_size=1, max_size=12).filter('__metadata__'.__ne__)
TENSORS = st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from([*TORCH_DTYPES])), min_size=1, max_size=30)


class Saved:
    """Random bytes for given tensors, written by simulated ranks and committed.

    Args:
        sliced: Share of what is read of which, with a writer that can, every rank writes or sends its slice.
        fused: Share of the tensors that are read together with the one before, if that is of their type.
    """

    def __init__(
        self,
        parent: Path,
        tensors: dict[str, tuple[tuple[int, ...], str]],
        strategy: WriteStrategy,
        world_size: int,
        shard_nbytes: int = 2_000,
        bucket_nbytes: int = 1_000,
        sliced: float = 1.0,
        fused: float = 0.3,
        seed: int = 0,
    ) -> None:
        dice = random.Random(seed)
        entries, specs = _entries_and_specs(tensors, fused, dice)
        self.data = {entry.hf_name: dice.randbytes(entry.nbytes) for entry in entries}
        self.spread = {spec.name: _spread(spec, world_size, dice) for spec in specs if dice.random() < sliced}
        self.plan = make_plan(
            entries,
            specs,
            max_shard_nbytes=shard_nbytes,
            bucket_nbytes=bucket_nbytes,
            strategy=strategy,
            world_size=world_size,
            spread=self.spread,
            round_nbytes=bucket_nbytes // 2 or 1,
        )
        folder = CheckpointFolder(parent / 'hf_model', max_keep=1)
        ranks = [Writer(pending_nbytes=bucket_nbytes).start() for _ in range(world_size)]
        made = ranks[0].create(self.plan, folder.open_staging())
        for rank in ranks:
            rank.open(self.plan, folder.staging, made)
        self._write(ranks, dice)
        self.written = together([rank.finish() for rank in ranks]).written()
        for rank in ranks:
            rank.close()
        folder.commit(WrittenSave(self.plan, self.written, Step('iter', 1, 1)))
        self.path = folder.path

    def _write(self, ranks: list[Writer], dice: random.Random) -> None:
        """Ranks go on in a random order; each has its own chunks in the order of the plan."""
        queues = [list(self._chunks(rank, len(ranks))) for rank in range(len(ranks))]
        while any(queues):
            rank = dice.choice([rank for rank, queue in enumerate(queues) if queue])
            ranks[rank].write(queues[rank].pop(0))

    def _chunks(self, rank: int, world_size: int) -> Iterator[Chunk]:
        for group in self.plan.in_place:
            held = self.spread[group.reads[0].name].held_by(rank)
            for place in group.placements:
                numel, width = math.prod(place.shape), DTYPE_NBYTES[place.dtype]
                start, end = ((min(max(at - place.source_offset, 0), numel)) * width for at in (held.start, held.stop))
                if start < end:
                    yield Chunk(place, memoryview(self.data[place.hf_name])[start:end], start)
        for portion in (p for at_once in self.plan.rounds for p in at_once.for_owner(rank)):
            for holder in range(world_size):
                held, place = portion.held_by(holder), portion.placement
                if held:
                    data = memoryview(self.data[place.hf_name])[held.start * portion.width : held.stop * portion.width]
                    yield Chunk(place, data, held.start * portion.width)
        for place in (p for bucket in self.plan.buckets for group in bucket for p in group.placements):
            if place.owner == rank:
                yield Chunk(place, memoryview(self.data[place.hf_name]))


def _spread(spec: TensorSpec, world_size: int, dice: random.Random) -> Spread:
    """As ZeRO-3 does it, as a part of something flat that is cut into equal parts, or on a mesh, with copies."""
    numel, way = math.prod(spec.shape), dice.random()
    if way < 0.4:
        return in_rank_order(numel, max(1, -(-numel // world_size)), world_size)
    skipped = dice.randrange(20)
    if way < 0.7:
        return Spread(numel, _axes(skipped + numel + 1, world_size, dice), skipped)
    each = -(-(skipped + numel + dice.randrange(1, 20)) // world_size)
    return in_rank_order(numel, each, world_size, skipped)


def _axes(each: int, world_size: int, dice: random.Random) -> tuple[Axis, ...]:
    """Dimensions of a mesh of so many ranks, in any order."""
    sizes = [size for size in (2, 2, 2, 3, 5, 7) if world_size % size == 0][: dice.randint(1, 3)]
    while world_size % math.prod(sizes):
        sizes.pop(0)
    sizes.append(world_size // math.prod(sizes))
    strides = [math.prod(sizes[:number]) for number in range(len(sizes))]
    axes = []
    for stride, size in dice.sample([*zip(strides, sizes, strict=True)], len(sizes)):
        each = -(-each // size)
        axes.append(Axis(stride, size, each, holds_replicas=dice.random() < 0.5))
    return tuple(axes)


def _entries_and_specs(
    tensors: dict[str, tuple[tuple[int, ...], str]], fused: float, dice: random.Random
) -> tuple[list[ExportEntry], list[TensorSpec]]:
    """What goes out, and what is read: each tensor as it is, or one of several that lie in one, end to end."""
    together: list[list[tuple[str, tuple[int, ...], str]]] = []
    for name, (shape, dtype) in tensors.items():
        if together and together[-1][0][2] == dtype and dice.random() < fused:
            together[-1].append((name, shape, dtype))
        else:
            together.append([(name, shape, dtype)])
    entries, specs = [], []
    for i, parts in enumerate(together):
        read, dtype = f'read {i}', parts[0][2]
        firsts = [0, *itertools.accumulate(math.prod(shape) for _, shape, _ in parts)]
        specs.append(TensorSpec(read, parts[0][1] if len(parts) == 1 else (firsts[-1],), dtype))
        combine = None if len(parts) == 1 else partial(_cut)  # one for each group
        entries += [
            ExportEntry(name, shape, dtype, (read,), combine, source_offset=None if combine is None else first)
            for first, (name, shape, _) in zip(firsts, parts, strict=False)
        ]
    return entries, specs


def _cut(tensors: object) -> dict[str, bytes]:
    raise NotImplementedError('nothing is gathered here')


@pytest.fixture
def folder():
    """Of its own for each example of hypothesis; in memory, where flushing costs nothing."""
    memory = Path('/dev/shm')

    def make() -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix='property-', dir=memory if memory.is_dir() else None)

    return make


def check(saved: Saved, tensors: dict[str, tuple[tuple[int, ...], str]], shard_nbytes: int) -> None:
    """All that must hold of a saved folder."""
    read = {}
    for file in saved.plan.files:
        content = (saved.path / file.name).read_bytes()
        assert len(content) == file.nbytes and content.startswith(file.header)
        loaded = load_file(saved.path / file.name)
        assert save(loaded, {'format': 'pt'}) == content, 'not as the library would write them'
        assert not loaded.keys() & read.keys()
        read |= {n: (tuple(t.shape), dtype_code(t.dtype), bytes(host_bytes(t))) for n, t in loaded.items()}
        sizes = [tensor.nbytes for tensor in loaded.values() if tensor.nbytes]
        assert sum(sizes) <= shard_nbytes or len(sizes) == 1
    assert read == {name: (shape, dtype, saved.data[name]) for name, (shape, dtype) in tensors.items()}
    index = next(iter(saved.plan.indexes.values()), None)
    assert (index is None) == (len(saved.plan.files) == 1)
    if index is not None:
        on_disk = json.loads((saved.path / 'model.safetensors.index.json').read_text())
        assert on_disk == index and set(index['weight_map']) == set(tensors)
        assert index['metadata']['total_size'] == sum(map(len, saved.data.values()))
    assert assert_whole(saved.path) == 1
    for tensor in saved.written:
        data = saved.data[tensor.placement.hf_name]
        assert tensor.crc32 == zlib.crc32(data)
        assert tensor.non_finite == count_non_finite(memoryview(data), tensor.placement.dtype)


@given(
    tensors=TENSORS,
    strategy=st.sampled_from(WriteStrategy),
    world_size=st.integers(1, 8),
    shard_nbytes=st.integers(1, 5_000),
    bucket_nbytes=st.integers(1, 5_000),
    sliced=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_tensors(folder, tensors, strategy, world_size, shard_nbytes, bucket_nbytes, sliced, seed):
    with folder() as parent:
        saved = Saved(Path(parent), tensors, strategy, world_size, shard_nbytes, bucket_nbytes, sliced, seed)
        check(saved, tensors, shard_nbytes)
        for bucket in saved.plan.buckets:
            assert sum(group.read_nbytes for group in bucket) <= bucket_nbytes or len(bucket) == 1


@pytest.mark.parametrize('strategy', WriteStrategy)
def test_a_slice_larger_than_what_is_written_at_once(tmp_path, strategy):
    """It begins at 4 bytes modulo 8, where numbers must not be cut."""
    tensors = {'a': ((), 'F32'), 'B': ((2,), 'F32'), 'big': ((1301, 1303), 'BF16'), 'z': ((3, 0), 'I64')}
    assert 3 * PIECE_NBYTES < 1301 * 1303 * 2
    check(Saved(tmp_path, tensors, strategy, 2, 10**8, 10**8), tensors, 10**8)


def test_whether_ranks_hold_all_elements():
    """As a count of what each rank holds says, for spreads over four ranks whose inner parts fill the outer ones."""
    answers = set()
    for sizes in [[(1, 4)], [(1, 2)], [(2, 2), (1, 2)], [(1, 2), (2, 2)]]:
        for each in itertools.product(range(1, 6), repeat=len(sizes)):
            axes = tuple(Axis(stride, size, part) for (stride, size), part in zip(sizes, each, strict=True))
            if any(inner.each * inner.size < outer.each for outer, inner in itertools.pairwise(axes)):
                continue
            for numel, skipped in itertools.product(range(1, 7), range(4)):
                spread = Spread(numel, axes, skipped)
                held = {index for rank in range(4) for index in spread.held_by(rank)}
                is_held = math.prod(size for _, size in sizes) == 4 and held == {*range(numel)}
                assert spread.is_held_by(4) == is_held, spread
                answers.add(is_held)
    assert answers == {True, False}
