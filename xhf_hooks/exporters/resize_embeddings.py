"""Embeddings with more rows, for new tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from xhf_hooks.exporters.computed import ComputedTensor

#: XTuner pads the rows to a multiple of this, "for performance reasons".
ROWS_MULTIPLE = 64
_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class ResizedEmbedding:
    """A tensor ``(vocab, ...)`` as ``(rows, ...)``: each new row is the mean of those that there are.

    The mean is computed in float64, so that it does not depend on the order in which threads add.

    Attributes:
        made: Computes the tensor itself, where it is not the source's.
    """

    base: str
    rows: int
    made: ComputedTensor | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.base,) if self.made is None else self.made.reads

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight = tensors[self.base] if self.made is None else self.made(tensors)
        total = sum(chunk.double().sum(dim=0) for chunk in weight.split(_CHUNK_ROWS))
        mean = (total / len(weight)).to(weight.dtype)
        return torch.cat([weight, mean.expand(self.rows - len(weight), *weight.shape[1:])])
