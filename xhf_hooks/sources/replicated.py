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
from xhf_hooks.planning.types import SavePlan
from xhf_hooks.sources.base import Source

_WORD_NBYTES = 8
_PIECE_NBYTES = 8 * 2**20


class Replicas:
    """The tensors that a save reads and that every rank has whole; empty in a run of one rank.

    Runs on: all ranks, every method.
    """

    def __init__(self, plan: SavePlan, source: Source, world_size: int) -> None:
        specs = plan.reads if world_size > 1 else ()
        names = [spec.name for spec in specs if not spec.from_master]
        self.tensors: Mapping[str, torch.Tensor] = source.replicated(names)
        self._checksums = np.zeros(len(self.tensors), np.int64)
        self._error: Exception | None = None

    def read(self) -> None:
        """Take the checksums. Does not communicate; :meth:`require_same` tells of a failure. Runs on: any thread."""
        try:
            self._checksums = np.array([int(_checksum(tensor)) for tensor in self.tensors.values()], np.int64)
        except Exception as error:
            self._error = error

    def require_same(self, collective: Collective) -> None:
        """Compare the checksums across ranks.

        Raises:
            ModelError: A tensor differs; the same error on every rank.
            AgreedError: A rank could not take the checksums.
        """
        collective.agree('compare', self._error)
        differing = np.flatnonzero(self._checksums != collective.broadcast(self._checksums))
        if not collective.any(bool(len(differing)), 'compare'):
            return
        firsts = collective.all_gather((int(differing[0]), len(differing)) if len(differing) else None)
        odd = [rank for rank, found in enumerate(firsts) if found is not None]
        first, most = min(found[0] for found in firsts if found), max(found[1] for found in firsts if found)
        raise ModelError(
            f'{list(self.tensors)[first]}: expected equal copies on all ranks, found other values on ranks {odd} than '
            f'on rank 0 (in {most} of {len(self.tensors)} tensors). Wrap the model in DistributedDataParallel, save '
            f'after ranks have averaged their weights (LocalSGD), or give each model a process group and a folder of '
            f'its own'
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
