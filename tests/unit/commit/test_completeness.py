"""Checksums and counts of a tensor do not depend on how its bytes were cut, or on who wrote them."""

from __future__ import annotations

import itertools
import random
import zlib
from functools import reduce

import pytest
import torch

from xhf_hooks.commit.completeness import assemble
from xhf_hooks.commit.receipts import merge, pack
from xhf_hooks.errors import IncompleteError
from xhf_hooks.format.dtypes import TORCH_DTYPES, host_bytes
from xhf_hooks.format.nonfinite import count_non_finite
from xhf_hooks.format.safetensors import FLOAT_DTYPES
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import Chunk, ExportEntry, TensorSpec, WriteReceipt
from xhf_hooks.writers import PositionalWriter

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

NBYTES = 5000
LIMITS = dict(max_shard_nbytes=10**6, bucket_nbytes=1)


@pytest.mark.parametrize('n_ranks', [1, 2, 5])
@pytest.mark.parametrize('seed', range(5))
def test_any_cut_gives_one_checksum(n_ranks, seed, tmp_path):
    order = random.Random(seed)
    spec = TensorSpec('w', (NBYTES // 4,), 'F32')
    plan = make_plan(
        [ExportEntry('w', spec.shape, 'F32', ('w',))],
        [spec],
        max_shard_nbytes=10**6,
        bucket_nbytes=1,
        n_writers=n_ranks,
        sliced={'w'},
    )
    (place,) = plan.placements
    values = torch.randn(NBYTES // 4, generator=torch.Generator().manual_seed(seed))
    values[[3, 700]] = torch.tensor([float('nan'), float('-inf')])
    content = host_bytes(values)
    cuts = [0, *sorted(4 * order.randrange(NBYTES // 4) for _ in range(7)), NBYTES]
    writers = [PositionalWriter(pending_nbytes=100, fsync=False) for _ in range(n_ranks)]
    made = writers[0].create(plan, tmp_path)
    for writer in writers:
        writer.open(plan, tmp_path, made)
    for start, end in itertools.pairwise(cuts):
        order.choice(writers).write(Chunk(place, content[start:end], start))
    packed = [pack(plan, writer.finish()) for writer in writers]
    order.shuffle(packed)
    records = reduce(merge, packed)
    assert len(records) == 1  # what is next to each other became one on the way
    (tensor,) = assemble(plan, records)
    assert tensor.crc32 == zlib.crc32(content)
    assert tensor.non_finite == 2
    assert (tmp_path / place.file).read_bytes()[place.offset :] == bytes(content)


def test_empty_tensors_need_no_receipt():
    spec = TensorSpec('w', (0, 3), 'F32')
    plan = make_plan([ExportEntry('w', spec.shape, 'F32', ('w',))], [spec], max_shard_nbytes=10**6, bucket_nbytes=1)
    (tensor,) = assemble(plan, pack(plan, []))
    assert (tensor.crc32, tensor.non_finite) == (zlib.crc32(b''), 0)
    receipt = WriteReceipt(tensor.placement.file, 'w', 0, 0, 0, 0)
    assert assemble(plan, pack(plan, [receipt])) == [tensor]


def test_what_is_not_planned_is_refused():
    plan = make_plan([ExportEntry('w', (3,), 'F32', ('w',))], [TensorSpec('w', (3,), 'F32')], **LIMITS)
    with pytest.raises(IncompleteError, match=r'written, but not in the plan.*other.safetensors'):
        pack(plan, [WriteReceipt('other.safetensors', 'w', 0, 12, 0, 0)])


@pytest.mark.parametrize('n_ranks', [1, 2, 3, 7, 64])
def test_records_of_many_ranks_become_one_for_each_tensor(n_ranks):
    """On the way to rank 0 nobody holds more than one for each tensor, whatever the number of ranks."""
    n_tensors, each = 50, 9
    specs = [TensorSpec(f'w{i}', (each * n_ranks,), 'U8') for i in range(n_tensors)]
    plan = make_plan([ExportEntry(s.name, s.shape, 'U8', (s.name,)) for s in specs], specs, **LIMITS)
    content = random.Random(n_ranks).randbytes(each * n_ranks)
    parts = [content[each * rank :][:each] for rank in range(n_ranks)]
    held = [
        pack(
            plan,
            [WriteReceipt(p.file, p.hf_name, each * rank, each, zlib.crc32(parts[rank]), 1) for p in plan.placements],
        )
        for rank in range(n_ranks)
    ]
    while len(held) > 1:
        held = [reduce(merge, held[i : i + 2]) for i in range(0, len(held), 2)]
        assert all(len(records) == n_tensors and records.dtype.itemsize == 32 for records in held)
    tensors = assemble(plan, held[0])
    assert {(t.crc32, t.non_finite) for t in tensors} == {(zlib.crc32(content), n_ranks)}
    assert [t.placement for t in tensors] == plan.placements


@pytest.mark.parametrize('code', sorted(FLOAT_DTYPES))
def test_non_finite_values_are_counted(code):
    dtype = TORCH_DTYPES[code]
    largest = torch.finfo(dtype).max
    values = torch.tensor([0.0, -0.0, 1.0, largest, -largest, torch.finfo(dtype).tiny], dtype=dtype)
    assert count_non_finite(host_bytes(values), code) == 0
    for bad in ('nan', '-nan', 'inf', '-inf'):
        found = torch.cat([values, torch.tensor([float(bad)], dtype=dtype)])
        assert count_non_finite(host_bytes(found), code) == 1, bad
    everything = torch.tensor([float('nan'), float('inf'), float('-inf')], dtype=dtype)
    assert count_non_finite(host_bytes(everything), code) == 3
    assert count_non_finite(host_bytes(values[:0]), code) == 0


@pytest.mark.parametrize('code', ['F8_E4M3', 'F8_E5M2', 'F16', 'BF16'])
def test_every_number_of_a_format_is_counted_as_torch_sees_it(code):
    dtype = TORCH_DTYPES[code]
    words = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int64).to(
        {1: torch.uint8, 2: torch.uint16}[dtype.itemsize]
    )
    numbers = words.view(dtype)
    expected = int((~numbers.float().isfinite()).sum())
    assert count_non_finite(host_bytes(numbers), code) == expected > 0
    for place in (~numbers.float().isfinite()).nonzero()[:8, 0].tolist():  # one alone, too
        number = numbers[place]
        assert count_non_finite(host_bytes(number.reshape(1)), code) == 1


def test_non_finite_values_far_apart_are_counted():
    numbers = torch.ones(3 * 2**20 + 1, dtype=torch.bfloat16)
    numbers[[0, 2**19, -1]] = torch.tensor([float('nan'), float('-inf'), float('inf')], dtype=torch.bfloat16)
    assert count_non_finite(host_bytes(numbers), 'BF16') == 3


def test_integers_are_all_finite():
    assert count_non_finite(host_bytes(torch.tensor([-1, 2**31 - 1], dtype=torch.int32)), 'I32') == 0
