"""Adds rows for new tokens to embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from xhf_hooks.exporters.base import ComputedTensor

#: XTuner pads the rows to a multiple of this, "for performance reasons".
ROWS_MULTIPLE = 64
_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class ResizedEmbedding:
    """Extends a tensor ``(vocab, ...)`` to ``(rows, ...)``: new rows are the mean of the existing ones.

    The mean is computed in float64, so that it does not depend on the order of summation by threads.

    Attributes:
        made: Computes the tensor to extend, if it is itself computed.
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
