"""Counts and checksums of the bytes written of each tensor, which all ranks can add up in any order.

CRC-32 is linear: the checksum of a concatenation is the XOR of the checksums of its parts, each shifted by the bytes
that follow it. So a rank needs a few numbers per tensor, however many ranks wrote parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xhf_hooks.errors import IncompleteError
from xhf_hooks.format.checksum import combine
from xhf_hooks.format.text import counted, some
from xhf_hooks.planning.types import Placement, WrittenTensor

#: Of the second row of the sums (bytes, spans, NaN and infinite values). Spans are sums of ``end**2 - start**2``: a
#: part that was written twice and a missing part of the same size cancel out in the bytes, but not there.
_PRIME = 2**31 - 1


class Tally:
    """The tally of one rank, or of all ranks after their tallies are added up. Used by: one thread.

    Attributes:
        sums: A column for each placement; those of all ranks are the sums of each rank's.
        checksums: CRC-32 of each; those of all ranks are the XOR of each rank's.
    """

    def __init__(self, placements: Sequence[Placement]) -> None:
        self._placements = placements
        self._number_of = {(one.file, one.hf_name): number for number, one in enumerate(self._placements)}
        self.sums = np.zeros((3, len(self._placements)), np.int64)
        self.checksums = np.zeros(len(self._placements), np.int64)

    def add(self, placement: Placement, start: int, nbytes: int, crc32: int, non_finite: int) -> None:
        """Count consecutive bytes of one tensor.

        Args:
            crc32: Checksum of the bytes, taken from memory before they were written.
        """
        number, end = self._number_of[placement.file, placement.hf_name], start + nbytes
        self.sums[:, number] += (nbytes, _span(start, end), non_finite)
        self.checksums[number] ^= combine(crc32, 0, placement.nbytes - end)

    def written(self) -> list[WrittenTensor]:
        """The tensors with their checksums, if these are the numbers of all ranks.

        Raises:
            IncompleteError: Bytes of a tensor are missing or were written twice.
        """
        tensors = []
        for number, placement in enumerate(self._placements):
            nbytes, spans, non_finite = self.sums[:, number].tolist()
            where = f'{placement.file}: {placement.hf_name}'
            if nbytes != placement.nbytes:
                raise IncompleteError(f'{where}: expected {placement.nbytes} bytes, ranks wrote {nbytes}')
            if spans % _PRIME != _span(0, nbytes):
                raise IncompleteError(
                    f'{where}: expected each of {nbytes} bytes once; ranks wrote some twice and some not at all'
                )
            tensors.append(WrittenTensor(placement, int(self.checksums[number]), non_finite))
        return tensors


def warn_of_non_finite(tensors: Sequence[WrittenTensor]) -> list[str]:
    """Warnings about NaN and infinite values in the written tensors."""
    bad = [tensor for tensor in tensors if tensor.non_finite]
    if not bad:
        return []
    shown = some([f'{tensor.placement.hf_name} ({tensor.non_finite})' for tensor in bad], 5)
    too_large = any(tensor.placement.dtype == 'F16' for tensor in bad)
    hint = '; float16 ends at 65504, beyond which weights become infinite: see the option dtype' if too_large else ''
    return [f'NaN or infinite values in {counted(len(bad), "tensor")}: {shown}{hint}']


def _span(start: int, end: int) -> int:
    return (end * end - start * start) % _PRIME
