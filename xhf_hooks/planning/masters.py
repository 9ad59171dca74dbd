"""Which outputs are made from fp32 masters: the answer for saves and conversions."""

from __future__ import annotations

from collections.abc import Sequence

from xhf_hooks.format.safetensors import FLOAT_DTYPES
from xhf_hooks.planning.types import ExportEntry, TensorSpec


def specs_with_masters(
    specs: Sequence[TensorSpec], entries: Sequence[ExportEntry], dtype: str | None
) -> list[TensorSpec]:
    """All specs, with that of its fp32 master in place of a tensor of which an output in another dtype is made.

    So each output is rounded once. An output in the dtype of training is the trained weight.

    Args:
        dtype: The option; None keeps the dtype of training, and no master is read.
    """
    if dtype is None:
        return [*specs]
    trained = {spec.name: spec.dtype for spec in specs}
    cast = {
        name
        for entry in entries
        for name in entry.reads
        if entry.dtype in FLOAT_DTYPES and entry.dtype != trained.get(name, entry.dtype)
    }
    return [spec.of_master() if spec.has_master and spec.name in cast else spec for spec in specs]
