"""What all ranks have written, put together: every byte of every tensor once, with checksums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from xhf_hooks.checksum import combine
from xhf_hooks.errors import IncompleteError
from xhf_hooks.records import Placement, SavePlan, WriteReceipt, WrittenTensor


def assemble(plan: SavePlan, receipts: Iterable[WriteReceipt]) -> list[WrittenTensor]:
    """The planned tensors, as the receipts of all ranks say they were written. Runs on: rank 0.

    A tensor's checksum is that of its bytes, however they were cut: CRC-32 of pieces can be combined.

    Raises:
        IncompleteError: Of some tensor bytes are missing, or were written twice.
    """
    runs: defaultdict[tuple[str, str], list[WriteReceipt]] = defaultdict(list)
    for receipt in receipts:
        runs[receipt.file, receipt.hf_name].append(receipt)
    found = [_assemble_one(place, runs.pop((place.file, place.hf_name), [])) for place in plan.placements]
    if runs:
        raise IncompleteError(f'not planned, and yet written: {sorted(runs)[:5]}')
    return found


def _assemble_one(place: Placement, receipts: list[WriteReceipt]) -> WrittenTensor:
    crc = end = non_finite = 0
    for receipt in sorted(receipts, key=lambda receipt: receipt.start):
        if receipt.start != end:
            break
        crc = combine(crc, receipt.crc32, receipt.nbytes)
        end += receipt.nbytes
        non_finite += receipt.non_finite
    written = sum(receipt.nbytes for receipt in receipts)
    if end != place.nbytes or written != end:
        raise IncompleteError(
            f'{place.file}: {place.hf_name}: expected {place.nbytes} bytes, found {written} in {len(receipts)} '
            f'pieces, without a gap or overlap up to byte {end}'
        )
    return WrittenTensor(place, crc, non_finite)


def warn_of_non_finite(tensors: list[WrittenTensor]) -> list[str]:
    """What to tell the user about NaN and infinite values that were written."""
    bad = [tensor for tensor in tensors if tensor.non_finite]
    if not bad:
        return []
    some = ', '.join(f'{tensor.placement.hf_name} ({tensor.non_finite})' for tensor in bad[:5])
    more = f' and {len(bad) - 5} more' if len(bad) > 5 else ''
    return [f'NaN or infinite values in {len(bad)} tensors: {some}{more}']
