"""Checksums and counts of a tensor do not depend on how its bytes were cut, or on who wrote them."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest
import torch

from xhf_hooks.commit.contents import assemble
from xhf_hooks.dtypes import TORCH_DTYPES, host_bytes
from xhf_hooks.nonfinite import count_non_finite
from xhf_hooks.plan import make_plan
from xhf_hooks.records import Chunk, ExportEntry, TensorSpec, WriteReceipt
from xhf_hooks.safetensors_format import FLOAT_DTYPES
from xhf_hooks.writers import PositionalWriter

NBYTES = 5000


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
        writer.open(tmp_path, made)
    for start, end in itertools.pairwise(cuts):
        order.choice(writers).write(Chunk(place, content[start:end], start))
    receipts = [receipt for writer in writers for receipt in writer.finish()]
    order.shuffle(receipts)
    (tensor,) = assemble(plan, receipts)
    assert tensor.crc32 == zlib.crc32(content)
    assert tensor.non_finite == 2
    assert (tmp_path / place.file).read_bytes()[place.offset :] == bytes(content)


def test_empty_tensors_need_no_receipt():
    spec = TensorSpec('w', (0, 3), 'F32')
    plan = make_plan([ExportEntry('w', spec.shape, 'F32', ('w',))], [spec], max_shard_nbytes=10**6, bucket_nbytes=1)
    (tensor,) = assemble(plan, [])
    assert (tensor.crc32, tensor.non_finite) == (zlib.crc32(b''), 0)
    receipt = WriteReceipt(tensor.placement.file, 'w', 0, 0, 0, 0)
    assert assemble(plan, [receipt]) == [tensor]


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
    for number in numbers[~numbers.float().isfinite()][:8]:  # one alone, too
        assert count_non_finite(host_bytes(number.reshape(1)), code) == 1


def test_non_finite_values_far_apart_are_counted():
    numbers = torch.ones(3 * 2**20 + 1, dtype=torch.bfloat16)
    numbers[[0, 2**19, -1]] = torch.tensor([float('nan'), float('-inf'), float('inf')], dtype=torch.bfloat16)
    assert count_non_finite(host_bytes(numbers), 'BF16') == 3


def test_integers_are_all_finite():
    assert count_non_finite(host_bytes(torch.tensor([-1, 2**31 - 1], dtype=torch.int32)), 'I32') == 0
