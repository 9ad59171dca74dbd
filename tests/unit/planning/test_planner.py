"""Planning, without a tensor: files, offsets, buckets, index and digest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.helpers.zoo import build
from xhf_hooks.errors import PlanError
from xhf_hooks.exporters.huggingface import HuggingFaceExporter
from xhf_hooks.options import parse_size
from xhf_hooks.planning.planner import describe_group, describe_plan, make_plan
from xhf_hooks.planning.types import Bucket, ExportEntry, FileSet, SavePlan, TensorSpec
from xhf_hooks.sources.read import gathered_slices

HUGE = 10**12


def spec(name: str, *shape: int, dtype: str = 'F32') -> TensorSpec:
    return TensorSpec(name, shape, dtype)


def passed_on(source: TensorSpec, **changes) -> ExportEntry:
    """The entry of a tensor that goes out as it is."""
    return replace(ExportEntry(f'hf.{source.name}', source.shape, source.dtype, (source.name,)), **changes)


def plan_of(specs, entries=None, *, shard=HUGE, bucket=HUGE, **options) -> SavePlan:
    entries = [passed_on(s) for s in specs] if entries is None else entries
    return make_plan(entries, specs, max_shard_nbytes=shard, bucket_nbytes=bucket, **options)


@pytest.mark.parametrize(
    ('size', 'nbytes'),
    [
        (1, 1),
        ('5GB', 5 * 10**9),
        (' 5 GB ', 5 * 10**9),
        ('1.5MB', 1_500_000),
        ('5GiB', 5 * 2**30),
        ('1TiB', 2**40),
    ],
)
def test_parse_size(size, nbytes):
    assert parse_size(size) == nbytes


@pytest.mark.parametrize(
    'size',
    [0, -1, 1.5, True, None, '', 'GB', '0', '0GB', '-5GB', '5XB', '5 G B', '1e9', '0.5B', '5,000', 'nan'],
)
def test_parse_size_refuses(size):
    with pytest.raises(ValueError, match='not a size'):
        parse_size(size)


def test_offsets_are_gapless_and_in_file_order():
    plan = plan_of([spec('b', 3), spec('a', 2, 2), spec('n', dtype='I64'), spec('e', 0, dtype='BF16')])
    (file,) = plan.files
    position = len(file.header)
    for placement in plan.placements:
        assert (placement.file, placement.offset) == (file.name, position)
        position += placement.nbytes
    assert position == file.nbytes == plan.nbytes
    assert file.name == 'model.safetensors' and plan.indexes == {}
    assert [p.hf_name for p in plan.placements] == ['hf.n', 'hf.a', 'hf.b', 'hf.e']


# Buckets


def names_of(bucket: Bucket) -> tuple[str, ...]:
    return tuple(spec.name for group in bucket.groups for spec in group.reads)


def test_buckets_keep_file_order_and_are_full():
    plan = plan_of([spec(f'w{i}', 10) for i in range(7)], bucket=100)
    assert [names_of(bucket) for bucket in plan.buckets] == [
        ('w0', 'w1'),
        ('w2', 'w3'),
        ('w4', 'w5'),
        ('w6',),
    ]
    assert plan.largest_bucket_nbytes == 80


def test_an_oversize_tensor_is_a_bucket_of_its_own():
    plan = plan_of([spec('a', 5), spec('b', 500), spec('c', 5), spec('d', 5)], bucket=100)
    assert [names_of(bucket) for bucket in plan.buckets] == [('a',), ('b',), ('c', 'd')]
    assert plan.largest_bucket_nbytes == 2000


def test_a_group_is_never_split():
    fused = spec('fused', 4, 30)
    parts = [ExportEntry(f'part{i}', (30,), 'F32', ('fused',), dict) for i in range(4)]
    plan = plan_of([spec('a', 1), fused, spec('z', 1)], [passed_on(spec('a', 1)), *parts, passed_on(spec('z', 1))])
    narrow = plan_of(
        [spec('a', 1), fused, spec('z', 1)],
        [passed_on(spec('a', 1)), *parts, passed_on(spec('z', 1))],
        bucket=100,
    )
    assert sorted(names_of(plan.buckets[0])) == ['a', 'fused', 'z']
    assert [names_of(bucket) for bucket in narrow.buckets] == [('a', 'z'), ('fused',)]
    assert [p.hf_name for p in narrow.buckets[1].groups[0].placements] == [f'part{i}' for i in range(4)]


# Several sets of files


def test_each_set_is_split_and_indexed_on_its_own():
    a, b = spec('a', 10), spec('b', 10)
    part, whole = FileSet('part'), FileSet('whole', 'adapter_model', may_split=False)
    entries = [passed_on(s, file_set=file_set) for file_set in (FileSet(), part, whole) for s in (a, b)]
    plan = plan_of([a, b], entries, shard=40)
    shards = ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    whole_file = 'whole/adapter_model.safetensors'
    assert [file.name for file in plan.files] == [*shards, *(f'part/{name}' for name in shards), whole_file]
    assert list(plan.indexes) == ['model.safetensors.index.json', 'part/model.safetensors.index.json']
    for index in plan.indexes.values():  # names relative to the index's own folder
        assert list(index['weight_map'].items()) == [('hf.a', shards[0]), ('hf.b', shards[1])]
    assert [(p.hf_name, p.file) for p in plan.placements[4:]] == [('hf.a', whole_file), ('hf.b', whole_file)]


# What is refused


def test_duplicate_name():
    with pytest.raises(PlanError, match='under the same name: hf'):
        plan_of([spec('a', 1)], [passed_on(spec('a', 1)), passed_on(spec('a', 1))])


def test_unknown_read():
    with pytest.raises(PlanError, match=r"hf.a is made from \['gone'\]"):
        plan_of([spec('a', 1)], [passed_on(spec('a', 1), reads=('a', 'gone'))])


@pytest.mark.parametrize(('shape', 'reads'), [((3,), ('a',)), ((4,), ('a', 'b')), ((4,), ())])
def test_uncombined_entry_must_be_its_one_read(shape, reads):
    with pytest.raises(PlanError, match=r'hf\.a'):
        plan_of([spec('a', 4), spec('b', 4)], [passed_on(spec('a', *shape), reads=reads)])


def test_one_combine_with_other_reads():
    entries = [ExportEntry('a', (1,), 'F32', ('x',), dict), ExportEntry('b', (1,), 'F32', ('y',), dict)]
    with pytest.raises(PlanError, match='b: made together with a, but'):
        plan_of([spec('x', 1), spec('y', 1)], entries)


def test_nothing_to_save():
    with pytest.raises(PlanError, match='nothing to save'):
        plan_of([spec('a', 1)], [])


# Digest and description

BASE = [spec('a', 4), spec('b', 2, 2)]


OTHERS = {
    'hf-name': plan_of(BASE, [passed_on(BASE[0]), passed_on(BASE[1], hf_name='hf.c')]),
    'shape': plan_of([spec('a', 4), spec('b', 4, 1)]),
    'dtype': plan_of(BASE, [passed_on(BASE[0]), passed_on(BASE[1], dtype='BF16')]),
    'combine': plan_of(BASE, [passed_on(BASE[0]), passed_on(BASE[1], combine=dict)]),
    'reads': plan_of(BASE, [passed_on(BASE[0], reads=('b',)), passed_on(BASE[1], reads=('a',))]),
    'bucket': plan_of(BASE, bucket=16),
    'shard': plan_of(BASE, shard=16),
}


@pytest.mark.parametrize('what', OTHERS)
def test_digest_differs(what):
    assert OTHERS[what].digest != plan_of(BASE).digest
    assert describe_plan(OTHERS[what]) != describe_plan(plan_of(BASE))


def test_digest_covers_the_index():
    sharded = dict(shard=16)
    assert plan_of(BASE, **sharded, n_parameters=8).digest != plan_of(BASE, **sharded, n_parameters=9).digest


def test_describe_plan():
    plan = plan_of([spec('a', 4), spec('b', 2, 2)], bucket=16)
    lines = describe_plan(plan)
    first, second = (describe_group(bucket.groups[0]) for bucket in plan.buckets)
    assert lines == [f'model.safetensors: {plan.nbytes} bytes', 'in slices', 'bucket', first, 'bucket', second]
    assert "('a', (4,), 'F32')" in first and "'hf.a'" in first and 'combined=False' in first


# The same as save_pretrained


@pytest.mark.parametrize('max_shard_size', ['20KB', '5GB'])
@pytest.mark.parametrize('family', ['llama', 'qwen2'])
def test_folder_of_save_pretrained(family, max_shard_size, tmp_path):
    """Files, their bytes and the index of a real model, written through a plan and a Writer."""
    from xhf_hooks.collective import Collective
    from xhf_hooks.sources.replicated import ModuleSource
    from xhf_hooks.writers.writer import Writer

    model = build(family)
    model.save_pretrained(tmp_path / 'expected', max_shard_size=max_shard_size)
    (tmp_path / 'found').mkdir()

    source, exporter = ModuleSource(model), HuggingFaceExporter(model, None)
    specs = source.specs()
    plan = make_plan(
        exporter.entries(specs, None),
        specs,
        max_shard_nbytes=parse_size(max_shard_size),
        bucket_nbytes=9_000,
        n_parameters=exporter.n_parameters,
    )
    writer = Writer(pending_nbytes=10_000)
    writer.open(plan, tmp_path / 'found', writer.create(plan, tmp_path / 'found'))
    for found in gathered_slices(plan, source, Collective()):
        writer.write(found.chunk())
    tally = writer.finish()

    expected = {path.name: path.read_bytes() for path in (tmp_path / 'expected').glob('*.safetensors')}
    found = {path.name: path.read_bytes() for path in (tmp_path / 'found').iterdir()}
    assert found == expected
    assert {t.placement.hf_name: t.placement.nbytes for t in tally.written()} == {
        p.hf_name: p.nbytes for p in plan.placements
    }
    indexes = {path.name: path.read_text() for path in (tmp_path / 'expected').glob('*.index.json')}
    assert len(indexes) == (max_shard_size == '20KB')
    assert {n: json.dumps(index, indent=2, sort_keys=True) + '\n' for n, index in plan.indexes.items()} == indexes
