"""Planning, without a tensor: sets of files, what is refused, and what the digest covers."""

from dataclasses import replace

import pytest

from xhf_hooks.errors import PlanError
from xhf_hooks.options import parse_size
from xhf_hooks.planning.checks import require_entries
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.planner import describe_plan, make_plan
from xhf_hooks.planning.spread import in_rank_order
from xhf_hooks.planning.types import ExportEntry, FileSet, TensorSpec
from xhf_hooks.planning.write_strategy import WriteStrategy

HUGE = 10**12
STREAM = WriteStrategy.STREAM


def spec(name: str, *shape: int, dtype: str = 'F32') -> TensorSpec:
    return TensorSpec(name, shape, dtype)


def passed_on(source: TensorSpec, **changes) -> ExportEntry:
    """The entry of a tensor that goes out as it is."""
    return replace(ExportEntry(f'hf.{source.name}', source.shape, source.dtype, (source.name,)), **changes)


def plan_of(specs, entries=None, *, shard=HUGE, bucket=HUGE, strategy=WriteStrategy.GATHER, **options) -> SavePlan:
    entries = [passed_on(s) for s in specs] if entries is None else entries
    how = dict(max_shard_nbytes=shard, bucket_nbytes=bucket, round_nbytes=HUGE, strategy=strategy, **options)
    return make_plan(entries, specs, **how)


def test_parse_size():
    sizes = {1: 1, '5GB': 5 * 10**9, ' 5 GB ': 5 * 10**9, '1.5MB': 1_500_000, '5GiB': 5 * 2**30}
    assert [parse_size(size) for size in sizes] == [*sizes.values()]
    for wrong in (0, -1, 1.5, True, None, '', 'GB', '0GB', '5XB', '1e9', '0.5B', '5,000', 'nan'):
        with pytest.raises(ValueError, match='not a size'):
            parse_size(wrong)


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


TWO = [spec('a', 4), spec('b', 4)]
REFUSED = [
    ([passed_on(TWO[0]), passed_on(TWO[0])], r'under the same name: hf\.a'),
    ([passed_on(TWO[0], reads=('a', 'gone'))], r"hf\.a: expected in reads the name of a tensor.*, found 'gone'"),
    ([passed_on(TWO[0], shape=(3,))], r'hf\.a: without combine, expected the shape \(4,\) of a, found \(3,\)'),
    ([passed_on(TWO[0], reads=('a', 'b'))], r"hf\.a: without combine, expected one tensor .*found \('a', 'b'\)"),
    ([passed_on(TWO[0], combine=dict, source_offset=2)], r"hf\.a: .*up to 6, found \[\('a', \(4,\)\)\]"),
    ([passed_on(TWO[0], combine=dict, source_offset=0, reads=('a', 'b'))], r"hf\.a: expected one tensor .*'b', \(4,\)"),
    ([passed_on(entry, combine=dict) for entry in TWO], r"hf\.b: made together with hf\.a: expected \('a',\), found"),
    ([], 'nothing to save'),
]


@pytest.mark.parametrize(('entries', 'words'), REFUSED)
def test_is_refused(entries, words):
    with pytest.raises(PlanError, match=words):
        require_entries(entries, TWO, 'Mine.export()')
        plan_of(TWO, entries)


BASE = [spec('a', 4), spec('b', 2, 2)]
OTHERS = {
    'hf-name': plan_of(BASE, [passed_on(BASE[0]), passed_on(BASE[1], hf_name='hf.c')]),
    'shape': plan_of([spec('a', 4), spec('b', 4, 1)]),
    'dtype': plan_of(BASE, [passed_on(BASE[0]), passed_on(BASE[1], dtype='BF16')]),
    'combine': plan_of(BASE, [passed_on(BASE[0]), passed_on(BASE[1], combine=dict)]),
    'reads': plan_of(BASE, [passed_on(BASE[0], reads=('b',)), passed_on(BASE[1], reads=('a',))]),
    'bucket': plan_of(BASE, bucket=16),
    'shard': plan_of(BASE, shard=16),
    'index': plan_of(BASE, shard=16, n_parameters=8),
    'who has what': plan_of(BASE, strategy=STREAM, spread={'a': in_rank_order(4, 2, 2)}),
    'more on the first': plan_of(BASE, strategy=STREAM, spread={'a': in_rank_order(4, 3, 2)}),
    'from another place': plan_of(BASE, strategy=STREAM, spread={'a': in_rank_order(4, 3, 2, 1)}),
}


def test_digest_differs():
    plans = [plan_of(BASE), *OTHERS.values()]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert len({tuple(describe_plan(plan)) for plan in plans}) == len(plans)


def test_small_slices_of_very_many_ranks_are_gathered():
    specs = [spec('norm', 4096, dtype='BF16'), spec('weight', 4096 * 4096, dtype='BF16')]
    for world_size, gathered in ((8, []), (1024, ['norm'])):
        spread = {
            spec.name: in_rank_order(spec.shape[0], -(-spec.shape[0] // world_size), world_size) for spec in specs
        }
        plan = plan_of(specs, strategy=STREAM, spread=spread)
        assert [group.reads[0].name for group in plan.gathered] == gathered
        pieces = sum(len(p.spread.holders) for at_once in plan.rounds for p in at_once.portions if p.number == 0)
        assert pieces <= plan.nbytes / 4096 + 16 * len(specs)


def test_each_file_has_one_owner_and_owners_as_many_bytes():
    plan = plan_of(
        [spec(f'w{i}', 10 + i) for i in range(17)], shard=100, strategy=WriteStrategy.PARALLEL, world_size=4, spread={}
    )
    owners = {file.name: {place.owner for place in plan.placements if place.file == file.name} for file in plan.files}
    assert all(len(found) == 1 for found in owners.values())
    loads = [sum(place.nbytes for place in plan.placements if place.owner == owner) for owner in range(4)]
    assert max(loads) - min(loads) <= max(file.nbytes for file in plan.files)
