"""Compares tensors of which every rank holds a whole copy, before the copies are stitched together.

DDP and DeepSpeed keep such copies equal. Without them, as in plain processes or between two syncs of LocalSGD, each
rank trains a model of its own, and a folder made of parts of several models would be none of them.

Each rank takes a checksum of each tensor where the tensor lives, at about the speed of its memory, and ranks compare
one array of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from xhf_hooks.distributed.collective import Collective
from xhf_hooks.errors import ModelError
from xhf_hooks.planning.types import SavePlan
from xhf_hooks.sources.base import Source

_WORD_NBYTES = 8
#: Words that are only added up. With fewer, the weights below cost more than the sums.
_ROW = 32
#: Small enough for a processor's cache, large beside the cost of a GPU kernel's launch.
_PIECE_NBYTES = 8 * 2**20
#: Odd numbers, so that no bits are lost modulo 2**64; as int64, which torch adds and multiplies with wrap-around.
_OF_ROW, _OF_PIECE = 0x9E3779B97F4A7C15 - 2**64, 0x2545F4914F6CDD1D


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
            self._checksums = checksums(list(self.tensors.values()))
        except Exception as error:
            self._error = error

    def require_same(self, collective: Collective) -> None:
        """Compare the checksums across ranks.

        Raises:
            ModelError: A tensor differs; the same error on every rank.
            AgreedError: A rank could not take the checksums.
        """
        if not self.tensors:
            return
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


def checksums(tensors: list[torch.Tensor]) -> np.ndarray:
    """A checksum of the bits of each tensor, in one array of int64."""
    found = np.zeros(len(tensors), np.int64)
    weights = {device: _weights(device) for device in {tensor.device for tensor in tensors}}
    of_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        of_device.setdefault(tensor.device, []).append(number)
    for device, numbers in of_device.items():  # one copy to the host for all tensors of a device
        found[numbers] = torch.stack([_checksum(tensors[number], weights[device]) for number in numbers]).cpu().numpy()
    return found


def _checksum(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A weighted sum of the tensor's bytes in row-major order, as 64-bit words, on its device.

    Only words within a row have the same weight. Different weights for all words take four times as long on a CPU.
    """
    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = data.numel() // (_ROW * _WORD_NBYTES) * (_ROW * _WORD_NBYTES)
    rest = data.new_zeros(_ROW * _WORD_NBYTES)
    rest[: data.numel() - whole] = data[whole:]
    found = torch.zeros((), dtype=torch.int64, device=data.device)
    for piece in (*data[:whole].split(_PIECE_NBYTES), rest):
        if piece.storage_offset() % _WORD_NBYTES:  # in a flat buffer; torch does not view it as words
            piece = piece.clone()
        rows = piece.view(torch.int64).view(-1, _ROW).sum(1)
        found = found * _OF_PIECE + (rows * weights[: len(rows)]).sum()
    return found


def _weights(device: torch.device) -> torch.Tensor:
    numbers = torch.arange(1, _PIECE_NBYTES // (_ROW * _WORD_NBYTES) + 1, device=device)
    return (numbers * _OF_ROW) | 1
