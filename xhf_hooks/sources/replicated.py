"""Compares the tensors, or parts of them, of which several ranks have a copy: those of DDP, ZeRO-0 to 2 and HSDP.

DDP, DeepSpeed and FSDP keep such copies equal. Without them, as in plain processes or between two syncs of LocalSGD,
each rank trains a model of its own, and a folder made of parts of several models would be none of them. So before a
save each rank takes a checksum of each tensor where the tensor lives, at about the speed of its memory, and ranks
compare a digest of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from xhf_hooks.collective import Collective
from xhf_hooks.errors import ModelError
from xhf_hooks.format.checksum import crc32
from xhf_hooks.planning.types import Spread
from xhf_hooks.sources.base import Source

_WORD_NBYTES = 8
_PIECE_NBYTES = 8 * 2**20


def checksums_of(names: Iterable[str], source: Source) -> np.ndarray:
    """Checksums of what this rank holds of each tensor. Does not communicate."""
    sums = [_checksum(source.local_shard(name, use_fp32_master=False).elements) for name in names]
    return torch.stack([found.to(sums[0].device) for found in sums]).cpu().numpy()  # waits once for a device


def require_same(copies: Mapping[str, Spread], checksums: np.ndarray, collective: Collective) -> None:
    """Compare what several ranks hold. Runs on: all ranks.

    Args:
        copies: Which ranks hold the same elements of each tensor.
        checksums: Of this rank's elements of each.

    Raises:
        ModelError: A tensor differs; the same error on every rank.
    """
    world_size, spreads = collective.world_size, list(copies.values())
    of_mesh = {spread.copied: spread for spread in spreads}
    firsts = {mesh: [spread.first_holder(rank) for rank in range(world_size)] for mesh, spread in of_mesh.items()}
    digests = np.zeros((len(firsts), world_size), np.int64)
    for row, mesh in zip(digests, firsts, strict=True):
        row[collective.rank] = crc32(checksums[[spread.copied == mesh for spread in spreads]].tobytes())
    digests = collective.all_reduce(digests, 'SUM', 'compare')
    if all((row == row[first]).all() for row, first in zip(digests, firsts.values(), strict=True)):
        return
    everyone = np.stack(collective.all_gather(checksums))
    is_odd = np.stack([own != own[firsts[s.copied]] for own, s in zip(everyone.T, spreads, strict=True)])
    differing, odd = np.flatnonzero(is_odd.any(1)), np.flatnonzero(is_odd.any(0)).tolist()
    expected = sorted({spreads[number].first_holder(rank) for number, rank in np.argwhere(is_odd).tolist()})
    raise ModelError(
        f'{list(copies)[differing[0]]}: expected equal copies on all ranks, found other values on ranks {odd} than on '
        f'rank {", ".join(map(str, expected))} (in {len(differing)} of {len(copies)} tensors). Wrap the model in '
        f'DistributedDataParallel, save after ranks have averaged their weights (LocalSGD), or give each model a '
        f'process group and a folder of its own'
    )


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
