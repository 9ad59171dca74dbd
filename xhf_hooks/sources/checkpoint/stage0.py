"""fp32 master weights of runs without ZeRO, which DeepSpeed saves without names.

``runtime/fp16/unfused_optimizer.py`` (``fp32_groups``) and ``fused_optimizer.py`` (``fp32_groups_flat``), in the
model file under ``optimizer``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.sources.checkpoint.regions import Regions
from xhf_hooks.sources.checkpoint.states import ModelState
from xhf_hooks.sources.checkpoint.unpickler import LazyTensor
from xhf_hooks.sources.stored_source import PieceReader, Region

_ROUNDED = ('BF16', 'F16')
_NOT_NAMED = (
    'the fp32 master weights of this run without ZeRO have no names and could not be matched: --dtype float32 '
    'converts the 16-bit weights instead'
)
_SAMPLE = 4096


def stage0_masters(model: ModelState, reader: PieceReader) -> tuple[Regions, str | None]:
    """Match masters to parameters where shape, order and values are unambiguous.

    Returns:
        The masters, and a warning if some were not matched.
    """
    optimizer = model.content.get('optimizer')
    optimizer = optimizer if isinstance(optimizer, dict) else {}
    trained = _parameters(model)
    masters = _masters(optimizer, trained)
    if masters is None:
        return {}, _NOT_NAMED
    dtypes = {tensor.dtype for tensor in trained.values()}
    alike: dict[_Look, list[LazyTensor]] = {}
    for master in masters:
        for dtype in dtypes:
            alike.setdefault(_look(master, dtype, reader), []).append(master)
    names: dict[_Look, list[str]] = {}
    for name, tensor in trained.items():
        names.setdefault(_look(tensor, tensor.dtype, reader), []).append(name)
    found: Regions = {}
    for look, candidates in names.items():
        # Tensors that look alike are in the same order in both, unless one of them has no master
        if len(candidates) == len(alike.get(look, ())):
            for name, master in zip(candidates, alike[look], strict=True):
                found[name] = Region(master.shape, master.dtype, (master.piece(),))
    return found, None if len(found) == len(masters) else _NOT_NAMED


#: Shape, dtype and the first values of a tensor, rounded to the dtype.
_Look = tuple[tuple[int, ...], str, bytes]


def _look(tensor: LazyTensor, dtype: str, reader: PieceReader) -> _Look:
    sample = torch.empty(min(tensor.numel, _SAMPLE), dtype=TORCH_DTYPES[dtype])
    reader.read_into((tensor.piece(),), 0, sample)
    return tensor.shape, dtype, sample.view(torch.uint8).numpy().tobytes()


def _parameters(model: ModelState) -> dict[str, LazyTensor]:
    """The 16-bit parameters of the state dict under their first names."""
    first = set({t.place: name for name, t in reversed(model.module.items()) if t.numel}.values())
    return {
        name: model.module[name]
        for name in model.module
        if name in first and name not in model.buffer_names and model.module[name].dtype in _ROUNDED
    }


def _masters(optimizer: dict[str, Any], trained: dict[str, LazyTensor]) -> list[LazyTensor] | None:
    """The masters in the optimizer's order; None if a flat one cannot be split into parameters."""
    groups = optimizer.get('fp32_groups', [])
    found = [tensor for group in groups if isinstance(group, list) for tensor in group]
    flat = optimizer.get('fp32_groups_flat', [])
    if isinstance(flat, list) and flat:
        if len(flat) > 1 or not _is_master(flat[0]) or flat[0].numel != sum(t.numel for t in trained.values()):
            return None
        starts = accumulate((t.numel for t in trained.values()), initial=flat[0].start)
        found += [
            replace(flat[0], start=start, shape=t.shape, stride=_row_major(t.shape))
            for start, t in zip(starts, trained.values(), strict=False)
        ]
    return found if all(map(_is_master, found)) else None


def _is_master(tensor: Any) -> bool:
    return isinstance(tensor, LazyTensor) and tensor.dtype == 'F32' and tensor.is_contiguous and tensor.numel > 0


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
