"""Compares replicas: tensors, or parts of them, that several ranks hold (DDP, ZeRO-0 to 2, HSDP).

DDP, DeepSpeed and FSDP keep replicas equal. Without them, as in plain processes or between two syncs of LocalSGD,
each rank trains a model of its own, and a folder made of parts of several models would be none of them. So before a
save each rank takes a checksum of each tensor where the tensor lives, at about the speed of its memory, and ranks
compare a digest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from xhf_hooks.collective import Collective
from xhf_hooks.errors import RanksDifferError
from xhf_hooks.format.checksum import crc32
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.base import Source

_WORD_NBYTES = 8
_PIECE_NBYTES = 8 * 2**20


def require_equal(source: Source, specs: Sequence[TensorSpec], collective: Collective) -> None:
    """Compare the replicas of these tensors. Runs on: all ranks.

    Raises:
        RanksDifferError: A tensor differs.
        AgreedError: A rank cannot read what it holds.
    """
    with collective.stage('compare'):
        spreads = source.replicated(specs)
        of_mesh = {spread.replicated: spread for spread in spreads.values()}
        ranks = range(collective.world_size)
        firsts = {mesh: [spread.first_holder(rank) for rank in ranks] for mesh, spread in of_mesh.items()}
        are_of_mesh = [np.array([spread.replicated == mesh for spread in spreads.values()]) for mesh in firsts]
        checksums = _checksums_of(list(spreads), source)
        # A row for each way in which replicas are spread, a column for each rank; zero but for this rank's
        digests = np.zeros((len(firsts), collective.world_size), np.int64)
        for row, is_of_mesh in zip(digests, are_of_mesh, strict=True):
            row[collective.rank] = crc32(checksums[is_of_mesh].tobytes())
    if not spreads:
        return
    digests, expected = collective.all_reduce(digests, 'SUM', 'compare'), digests
    with collective.stage('compare'):
        expected = np.stack([row[first] for row, first in zip(digests, firsts.values(), strict=True)])
    if (digests == expected).all():
        return
    with collective.stage('compare'):
        # Of each way, the checksums of the first rank whose replica differs, and of the rank with which it is compared:
        # as many numbers as there are tensors, however many ranks there are
        sides = np.zeros((2, len(spreads)), np.int64)
        for is_odd, first, is_of_mesh in zip(digests != expected, firsts.values(), are_of_mesh, strict=True):
            for rank in np.flatnonzero(is_odd)[:1].tolist():
                for side, holder in zip(sides, (first[rank], rank), strict=True):
                    side[is_of_mesh] = checksums[is_of_mesh] if holder == collective.rank else 0
    sides, difference = collective.all_reduce(sides, 'SUM', 'compare'), ''
    with collective.stage('compare'):
        odd = {
            rank: first[rank]
            for is_odd, first in zip(digests != expected, firsts.values(), strict=True)
            for rank in np.flatnonzero(is_odd).tolist()
        }
        differing = [spec.name for spec, is_odd in zip(spreads, sides[0] != sides[1], strict=True) if is_odd]
        difference = _describe_difference(differing, len(spreads), odd)
    raise RanksDifferError(difference)


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
    sums = [_checksum(source.local_elements(spec).elements) for spec in specs]
    return torch.stack([found.to(sums[0].device) for found in sums]).cpu().numpy()


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the tensor's bytes as 64-bit words, which differs between models that were trained apart."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = data.numel() // _WORD_NBYTES * _WORD_NBYTES
    total = data[whole:].sum()
    for piece in data[:whole].split(_PIECE_NBYTES):
        if piece.storage_offset() % _WORD_NBYTES:  # in a flat buffer; torch does not view it as words
            piece = piece.clone()
        total = total + piece.view(torch.int64).sum()
    return total
