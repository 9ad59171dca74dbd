"""Compares the tensors, or parts of them, of which several ranks have a copy: those of DDP, ZeRO-0 to 2 and HSDP.

DDP, DeepSpeed and FSDP keep such copies equal. Without them, as in plain processes or between two syncs of LocalSGD,
each rank trains a model of its own, and a folder made of parts of several models would be none of them. So before a
save each rank takes a checksum of each tensor where the tensor lives, at about the speed of its memory, and ranks
compare a digest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from xhf_hooks.collective import Collective
from xhf_hooks.errors import RanksDifferError
from xhf_hooks.format.checksum import crc32
from xhf_hooks.planning.spread import Spread
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.base import Source

_WORD_NBYTES = 8
_PIECE_NBYTES = 8 * 2**20


def require_equal(source: Source, specs: Sequence[TensorSpec], collective: Collective) -> None:
    """Compare what several ranks hold of these tensors. Runs on: all ranks.

    Raises:
        RanksDifferError: A tensor differs.
        AgreedError: A rank cannot read what it holds.
    """
    with collective.stage('compare'):
        spreads = source.replicated(specs)
        of_mesh = {spread.copied: spread for spread in spreads.values()}
        ranks = range(collective.world_size)
        firsts = {mesh: [spread.first_holder(rank) for rank in ranks] for mesh, spread in of_mesh.items()}
        checksums = _checksums_of(list(spreads), source)
        # A row for each way in which copies are spread, a column for each rank; zero but for this rank's
        digests = np.zeros((len(firsts), collective.world_size), np.int64)
        for row, mesh in zip(digests, firsts, strict=True):
            is_of_mesh = [spread.copied == mesh for spread in spreads.values()]
            row[collective.rank] = crc32(checksums[is_of_mesh].tobytes())
    if not spreads:
        return
    digests, are_equal = collective.all_reduce(digests, 'SUM', 'compare'), True
    with collective.stage('compare'):
        are_equal = all((row == row[first]).all() for row, first in zip(digests, firsts.values(), strict=True))
    if are_equal:
        return
    everyone, difference = collective.all_gather(checksums), ''
    with collective.stage('compare'):
        difference = _difference(everyone, spreads, firsts)
    raise RanksDifferError(difference)


def checksum_held(source: Source, specs: Sequence[TensorSpec], collective: Collective) -> int:
    """One checksum of all that this rank holds of these tensors. Runs on: all ranks, each with its own result.

    Without what a rank does not hold as consecutive elements, such as columns of a matrix.
    """
    held = source.spread(specs, collective)
    return crc32(_checksums_of([spec for spec in specs if spec.name in held], source).tobytes())


def _difference(
    everyone: Sequence[np.ndarray], spreads: Mapping[TensorSpec, Spread], firsts: Mapping[Any, list[int]]
) -> str:
    """What differs, by the checksums of all ranks."""
    columns = np.stack(everyone).T
    is_odd = np.stack([o != o[firsts[s.copied]] for o, s in zip(columns, spreads.values(), strict=True)])
    differing, odd = np.flatnonzero(is_odd.any(1)), np.flatnonzero(is_odd.any(0)).tolist()
    names, each = [spec.name for spec in spreads], list(spreads.values())
    expected = sorted({each[number].first_holder(rank) for number, rank in np.argwhere(is_odd).tolist()})
    return (
        f'{names[differing[0]]}: expected equal copies on all ranks, found other values on ranks {odd} than '
        f'on rank {", ".join(map(str, expected))} (in {len(differing)} of {len(names)} tensors). Wrap the '
        f'model in DistributedDataParallel, save after ranks have averaged their weights (LocalSGD), or give each '
        f'model a process group and a folder of its own'
    )


def _checksums_of(specs: Sequence[TensorSpec], source: Source) -> np.ndarray:
    """Checksums of what this rank holds of each tensor. Waits once for a device."""
    if not specs:
        return np.zeros(0, np.int64)
    sums = [_checksum(source.local_shard(spec).elements) for spec in specs]
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
