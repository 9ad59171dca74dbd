"""Pieces of a chunk are all of it, in order, and end at round offsets of the file."""

from __future__ import annotations

import pytest

from xhf_hooks.writers.writer import PIECE_NBYTES, cuts


def pieces(data: memoryview, offset: int) -> list[memoryview]:
    return [data[start:end] for start, end in cuts(data.nbytes, offset)]


@pytest.mark.parametrize('nbytes', [0, 8, 4096, PIECE_NBYTES - 8, PIECE_NBYTES, 3 * PIECE_NBYTES + 16])
@pytest.mark.parametrize('offset', [0, 8, 1234 * 8, PIECE_NBYTES - 8, 5 * PIECE_NBYTES, 7 * PIECE_NBYTES + 24])
def test_all_of_it_cut_at_the_files_boundaries(nbytes, offset):
    data = memoryview(bytes(range(256)) * (nbytes // 256 + 1))[:nbytes]
    found = pieces(data, offset)
    assert b''.join(found) == data
    assert all(0 < piece.nbytes <= PIECE_NBYTES for piece in found)
    inner_ends = [offset + sum(piece.nbytes for piece in found[:n]) for n in range(1, len(found))]
    assert all(end % PIECE_NBYTES == 0 for end in inner_ends)


@pytest.mark.parametrize('offset', [1, 7, 9, PIECE_NBYTES - 1, PIECE_NBYTES - 7, PIECE_NBYTES + 3])
def test_a_tensor_at_an_odd_offset_is_cut_between_elements(offset):
    data = memoryview(bytes(3 * PIECE_NBYTES))
    found = pieces(data, offset)
    assert sum(piece.nbytes for piece in found) == data.nbytes
    assert all(0 < piece.nbytes <= PIECE_NBYTES and piece.nbytes % 8 == 0 for piece in found)
