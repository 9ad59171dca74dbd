"""Checks that the ranks together wrote every byte of every tensor exactly once."""

from __future__ import annotations

import numpy as np

from xhf_hooks.errors import IncompleteError
from xhf_hooks.format.text import some
from xhf_hooks.planning.types import Placement, SavePlan, WrittenTensor


def assemble(plan: SavePlan, records: np.ndarray) -> list[WrittenTensor]:
    """Combine the records of all ranks (receipts.py) into the written tensors and their checksums. Runs on: rank 0.

    Raises:
        IncompleteError: Bytes of a tensor are missing or were written twice.
    """
    placements = plan.placements
    expected = np.array([place.nbytes for place in placements], np.uint64)
    n_pieces = np.bincount(records['placement'], minlength=len(placements))
    # Adjacent pieces were joined: a complete tensor is one record
    whole = n_pieces == (expected > 0)
    whole[records['placement']] &= (records['start'] == 0) & (records['nbytes'] == expected[records['placement']])
    for number in np.flatnonzero(~whole)[:1]:
        raise IncompleteError(_what_is_wrong(placements[number], records[records['placement'] == number]))
    crcs, non_finite = np.zeros(len(placements), np.uint32), np.zeros(len(placements), np.uint64)
    crcs[records['placement']], non_finite[records['placement']] = records['crc32'], records['non_finite']
    return [WrittenTensor(*one) for one in zip(placements, crcs.tolist(), non_finite.tolist(), strict=True)]


def _what_is_wrong(place: Placement, pieces: np.ndarray) -> str:
    first = pieces['nbytes'][:1].sum() if len(pieces) and pieces['start'][0] == 0 else 0
    return (
        f'{place.file}: {place.hf_name}: expected {place.nbytes} bytes, found {pieces["nbytes"].sum()} in '
        f'{len(pieces)} pieces; the first gap or overlap is at byte {first}'
    )


def warn_of_non_finite(tensors: list[WrittenTensor]) -> list[str]:
    """Warnings about NaN and infinite values in the written tensors."""
    bad = [tensor for tensor in tensors if tensor.non_finite]
    if not bad:
        return []
    shown = some([f'{tensor.placement.hf_name} ({tensor.non_finite})' for tensor in bad], 5)
    return [f'NaN or infinite values in {len(bad)} tensors: {shown}']
