"""Compares the tensors of which every rank has a whole copy: those of DDP, DeepSpeed ZeRO-0 to 2.

DDP and DeepSpeed keep such copies equal. Without them, as in plain processes or between two syncs of LocalSGD, each
rank trains a model of its own, and a folder made of parts of several models would be none of them. So before a save
each rank takes a checksum of each tensor where the tensor lives, at about the speed of its memory, and ranks compare
one array of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from xhf_hooks.collective import Collective
from xhf_hooks.errors import ModelError

_WORD_NBYTES = 8
_PIECE_NBYTES = 8 * 2**20


def require_same(copies: Mapping[str, torch.Tensor], collective: Collective) -> None:
    """Compare tensors of which every rank has a whole copy. Runs on: all ranks.

    Raises:
        ModelError: A tensor differs; the same error on every rank.
        AgreedError: A rank could not take the checksums.
    """
    with collective.stage('compare'):
        sums = [_checksum(tensor) for tensor in copies.values()]
        checksums = torch.stack([found.to(sums[0].device) for found in sums]).cpu().numpy()  # waits once for a device
    differing = np.flatnonzero(checksums != collective.broadcast(checksums))
    if not collective.any(bool(len(differing)), 'compare'):
        return
    firsts = collective.all_gather((int(differing[0]), len(differing)) if len(differing) else None)
    odd = [rank for rank, found in enumerate(firsts) if found is not None]
    first, most = min(found[0] for found in firsts if found), max(found[1] for found in firsts if found)
    raise ModelError(
        f'{list(copies)[first]}: expected equal copies on all ranks, found other values on ranks {odd} than on rank 0 '
        f'(in {most} of {len(copies)} tensors). Wrap the model in DistributedDataParallel, save after ranks have '
        f'averaged their weights (LocalSGD), or give each model a process group and a folder of its own'
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
