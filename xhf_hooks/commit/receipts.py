"""Packs receipts into records of 32 bytes, which are merged on their way to rank 0.

At ZeRO-3, N ranks write N pieces of each tensor. ``Collective.reduce`` joins records of adjacent pieces, so that no
rank holds many more records than there are tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from xhf_hooks.errors import IncompleteError
from xhf_hooks.format.checksum import combine
from xhf_hooks.planning.types import SavePlan, WriteReceipt

#: Consecutive bytes of the placement with this index in ``SavePlan.placements``; other fields as in WriteReceipt.
RECORD = np.dtype([('placement', 'u4'), ('crc32', 'u4'), ('start', 'u8'), ('nbytes', 'u8'), ('non_finite', 'u8')])


def pack(plan: SavePlan, receipts: Iterable[WriteReceipt]) -> np.ndarray:
    """Convert receipts to records and join adjacent ones. Runs on: all ranks.

    Raises:
        IncompleteError: A receipt is not in the plan.
    """
    number_of = {(place.file, place.hf_name): number for number, place in enumerate(plan.placements)}
    receipts = [receipt for receipt in receipts if receipt.nbytes]
    unknown = sorted({(r.file, r.hf_name) for r in receipts} - number_of.keys())
    if unknown:
        raise IncompleteError(f'written, but not in the plan: {unknown[:5]}')
    rows = [(number_of[r.file, r.hf_name], r.crc32, r.start, r.nbytes, r.non_finite) for r in receipts]
    return _join(np.array(rows, RECORD))


def merge(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Merge two sets of records and join adjacent ones."""
    return _join(np.concatenate([ours, theirs]))


def _join(records: np.ndarray) -> np.ndarray:
    """Sort by placement and start, and join adjacent records."""
    records = records[np.lexsort((records['start'], records['placement']))]
    before, after = records[:-1], records[1:]
    goes_on = (before['placement'] == after['placement']) & (before['start'] + before['nbytes'] == after['start'])
    heads = np.flatnonzero(np.concatenate([np.ones(min(1, len(records)), bool), ~goes_on]))
    if len(heads) == len(records):
        return records
    joined = records[heads]
    for field in ('nbytes', 'non_finite'):
        joined[field] = np.add.reduceat(records[field], heads)
    tails = np.flatnonzero(goes_on) + 1
    head_of_tail = np.searchsorted(heads, tails, side='right') - 1
    crcs = joined['crc32'].tolist()
    columns = (column.tolist() for column in (head_of_tail, records['crc32'][tails], records['nbytes'][tails]))
    for head, crc, nbytes in zip(*columns, strict=True):
        crcs[head] = combine(crcs[head], crc, nbytes)
    joined['crc32'] = crcs
    return joined
