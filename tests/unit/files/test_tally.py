"""Checksums and counts of a tensor do not depend on how its bytes were cut, or on who wrote them."""

import zlib

import pytest
import torch

from tests.helpers.runs.tallies import plan_of, together
from xhf_hooks.errors import IncompleteError
from xhf_hooks.files.tally import Tally
from xhf_hooks.format import checksum
from xhf_hooks.format.checksum import count_non_finite
from xhf_hooks.format.dtypes import TORCH_DTYPES, host_bytes
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.types import WrittenTensor


def tally_of(plan: SavePlan, content: bytes, parts: list[tuple[int, int]]) -> Tally:
    """What a rank has that wrote these parts of the first tensor, from start to end."""
    tally = Tally(plan.placements)
    for start, end in parts:
        tally.add(plan.placements[0], start, end - start, zlib.crc32(content[start:end]), 0)
    return tally


@pytest.mark.parametrize(
    ('parts', 'found'),
    [
        ([], 'expected 10 bytes, ranks wrote 0'),
        ([(0, 1), (2, 10)], 'expected 10 bytes, ranks wrote 9'),
        ([(0, 10), (0, 10)], 'expected 10 bytes, ranks wrote 20'),
        ([(0, 4), (2, 4), (6, 10)], 'expected each of 10 bytes once'),
    ],
)
def test_what_is_missing_or_written_twice_is_refused(parts, found):
    plan = plan_of(10, 3)
    tallies = [tally_of(plan, bytes(10), [part]) for part in parts] or [Tally(plan.placements)]
    with pytest.raises(IncompleteError, match=f'^model.safetensors: w0: {found}'):
        together(tallies).written()


def test_empty_tensors_need_no_part():
    plan = plan_of(0)
    expected = [WrittenTensor(plan.placements[0], zlib.crc32(b''), 0)]
    assert Tally(plan.placements).written() == expected
    assert tally_of(plan, b'', [(0, 0)]).written() == expected


@pytest.mark.parametrize('code', ['F8_E4M3', 'F8_E5M2', 'F16', 'BF16'])
def test_every_number_of_a_format_is_counted_as_torch_sees_it(code):
    dtype = TORCH_DTYPES[code]
    words = torch.arange(2 ** (8 * dtype.itemsize)).to({1: torch.uint8, 2: torch.int16}[dtype.itemsize])
    numbers = words.view(dtype)
    expected = int((~numbers.float().isfinite()).sum())
    assert count_non_finite(host_bytes(numbers), code) == expected > 0
    for place in (~numbers.float().isfinite()).nonzero()[:8, 0].tolist():  # one alone, too
        number = numbers[place]
        assert count_non_finite(host_bytes(number.reshape(1)), code) == 1


def test_combined_pieces_larger_than_four_gigabytes():
    """Zeros leave a checksum of zeros before them alone: combining is a matter of the size."""
    size, half = 2**33, zlib.crc32(bytes(2**20))
    whole, step = half, 2**20
    while step < size:
        whole = checksum.combine(whole, whole, step)
        step *= 2
    assert whole == checksum.combine(0, whole, size)
    assert checksum.combine(checksum.crc32(b'a'), whole, size) != checksum.combine(checksum.crc32(b'b'), whole, size)


def test_checksums_are_combined():
    assert checksum.combine(zlib.crc32(b'ab'), zlib.crc32(b'cde'), 3) == zlib.crc32(b'abcde')
