"""Compares replicas: tensors, or parts of them, that several ranks hold (DDP, ZeRO-0 to 2, HSDP).

DDP, DeepSpeed and FSDP keep replicas equal. Without them, as in plain processes or between two syncs of LocalSGD,
each rank trains a model of its own, and a folder made of parts of several models would be none of them. So before a
save each rank takes a checksum of each tensor where the tensor lives, at about the speed of its memory, and ranks
compare a digest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from xhf_hooks.errors import RanksDifferError
from xhf_hooks.format.checksum import crc32
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.sources.base import Source
from xhf_hooks.sources.checks import read_local_elements

_WORD_NBYTES = 8
_PIECE_NBYTES = 8 * 2**20


@dataclass(frozen=True)
class _Replicas:
    """The replicas that this rank holds.

    Tensors are replicated in few ways: over all ranks, say, or over each column of a mesh. What is exchanged first has
    one number for each way and rank, not for each tensor.

    Attributes:
        names: The names of the tensors.
        checksums: One of each tensor.
        has_way: For each way, which of the tensors are replicated so.
        first_holders: For each way and each rank, the first rank that holds the same elements: the ranks' replicas must
            be equal to that one's.
    """

    names: list[str]
    checksums: np.ndarray
    has_way: list[np.ndarray]
    first_holders: list[list[int]]

    @classmethod
    def read(cls, source: Source, specs: Sequence[TensorSpec], world_size: int) -> _Replicas:
        """Take the checksums."""
        spreads = source.replicated(specs)
        ways = {spread.replicated: spread for spread in spreads.values()}
        return cls(
            [spec.name for spec in spreads],
            _checksums_of(list(spreads), source),
            [np.array([spread.replicated == way for spread in spreads.values()]) for way in ways],
            [[spread.first_holder(rank) for rank in range(world_size)] for spread in ways.values()],
        )

    def digests(self, rank: int, world_size: int) -> np.ndarray:
        """A row for each way, a column for each rank; zero but for this rank's column."""
        digests = np.zeros((len(self.has_way), world_size), np.int64)
        for row, has_way in zip(digests, self.has_way, strict=True):
            row[rank] = crc32(self.checksums[has_way].tobytes())
        return digests

    def differing_ranks(self, digests: np.ndarray) -> list[dict[int, int]]:
        """For each way, the ranks whose replicas differ, each with the rank whose replicas were expected.

        Args:
            digests: Those of all ranks.
        """
        return [
            {rank: firsts[rank] for rank in np.flatnonzero(row != row[firsts]).tolist()}
            for row, firsts in zip(digests, self.first_holders, strict=True)
        ]

    def sides(self, differing: Sequence[Mapping[int, int]], rank: int) -> np.ndarray:
        """Two rows of checksums of all tensors: the expected ones, and those of the first rank that differs.

        They are zero where this rank is not the one that has them, so the sum over ranks has both.
        """
        sides = np.zeros((2, len(self.names)), np.int64)
        for ranks, has_way in zip(differing, self.has_way, strict=True):
            for odd, expected in [*ranks.items()][:1]:
                for side, holder in zip(sides, (expected, odd), strict=True):
                    side[has_way] = self.checksums[has_way] if holder == rank else 0
        return sides


def require_equal(source: Source, specs: Sequence[TensorSpec], collective: Collective) -> None:
    """Compare the replicas of these tensors. Runs on: all ranks.

    Raises:
        RanksDifferError: A tensor differs.
        AgreedError: A rank cannot read what it holds.
    """
    rank, world_size = collective.rank, collective.world_size
    if world_size == 1:
        return
    read: list[_Replicas] = []

    def digests_of_this_rank() -> list[np.ndarray]:
        read.append(_Replicas.read(source, specs, world_size))
        return [read[0].digests(rank, world_size)]

    (digests,) = collective.reduce_over_ranks('compare', digests_of_this_rank, ['SUM'])
    if not digests.size:  # nothing is replicated
        return
    with collective.stage('compare'):
        (replicas,) = read
        differing = replicas.differing_ranks(digests)
    if not any(differing):
        return
    # As many numbers as there are tensors, however many ranks there are
    (sides,) = collective.reduce_over_ranks('compare', lambda: [replicas.sides(differing, rank)], ['SUM'])
    with collective.stage('compare'):
        names = [name for name, is_odd in zip(replicas.names, sides[0] != sides[1], strict=True) if is_odd]
        odd = {rank: expected for ranks in differing for rank, expected in ranks.items()}
        message = _describe_difference(names, len(replicas.names), odd)
    raise RanksDifferError(message)


def checksum_local_elements(source: Source, specs: Sequence[TensorSpec], collective: Collective) -> int:
    """One checksum of the elements of these tensors that this rank holds. Runs on: all ranks, each with its own result.

    Without what a rank does not hold as consecutive elements, such as columns of a matrix.
    """
    spreads = source.spread(specs, collective)
    return crc32(_checksums_of([spec for spec in specs if spec.name in spreads], source).tobytes())


def _describe_difference(differing: Sequence[str], n_tensors: int, odd: Mapping[int, int]) -> str:
    """The message for replicas that differ.

    Args:
        differing: Names of the tensors that differ on the first of the ranks in ``odd``.
        odd: Each rank that has other values, to the rank with which it was compared.
    """
    return (
        f'{differing[0]}: expected equal copies on all ranks, found other values on ranks {sorted(odd)} than on rank '
        f'{", ".join(map(str, sorted({*odd.values()})))} (in {len(differing)} of {n_tensors} tensors). Wrap the model '
        f'in DistributedDataParallel, save after ranks have averaged their weights (LocalSGD), or start the ranks of '
        f'each model as a job of their own, since all ranks of a job save one model'
    )


def _checksums_of(specs: Sequence[TensorSpec], source: Source) -> np.ndarray:
    """Checksums of what this rank holds of each tensor. Waits once for a device."""
    if not specs:
        return np.zeros(0, np.int64)
    sums = [_checksum(read_local_elements(source, spec).elements) for spec in specs]
    return torch.stack([found.to(sums[0].device) for found in sums]).cpu().numpy()


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the tensor's bytes as 64-bit words, which differs between models that were trained apart."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = data.numel() // _WORD_NBYTES * _WORD_NBYTES
    sums = [data[whole:].sum()] if whole < data.numel() else []
    for piece in data[:whole].split(_PIECE_NBYTES):
        if piece.storage_offset() % _WORD_NBYTES:  # in a flat buffer; torch does not view it as words
            piece = piece.clone()
        sums.append(piece.view(torch.int64).sum())
    return sum(sums[1:], sums[0])
