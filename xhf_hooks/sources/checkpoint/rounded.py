"""Checks on samples, before anything is written, that weights and their fp32 copies come from one save.

A conversion that reads masters compares all of them (:meth:`.PieceReader.read_into`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.sources.piece_reader import PieceReader
from xhf_hooks.sources.pieces import StoredTensor

#: Number of samples, and elements of each.
_PLACES, _ELEMENTS = 4096, 512


def require_rounded(tensors: Iterable[StoredTensor], reader: PieceReader) -> None:
    """Compare samples: the start, middle and end of every rank's part of every tensor, up to the limit.

    Raises:
        CheckpointError: Files come from different saves.
    """
    both = [tensor for tensor in tensors if tensor.copy]
    middles = [(t, (start + end - _ELEMENTS) // 2, start, end) for t in both for start, end in _parts(t)]
    edges = [(t, at, start, end) for t, _, start, end in middles for at in (start, end - _ELEMENTS)]
    chosen = _evenly(middles, _PLACES)
    chosen += _evenly(edges, _PLACES - len(chosen))
    for tensor, at, start, end in chosen:
        first, last = max(start, at), min(end, max(start, at) + _ELEMENTS)
        scratch = torch.empty(last - first, dtype=TORCH_DTYPES[tensor.dtype])
        reader.read_into(tensor.copy or (), first, scratch, beside=tensor)


def _parts(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """The element range of each piece of the copy."""
    start = 0
    for piece in tensor.copy or ():
        yield start, start + piece.numel
        start += piece.numel


def _evenly(items: Sequence, most: int) -> list:
    return list(items) if len(items) <= most else [items[i * len(items) // most] for i in range(most)]
