"""fp32 master weights of runs without ZeRO, which DeepSpeed saves without names.

``runtime/fp16/unfused_optimizer.py`` (``fp32_groups``) and ``fused_optimizer.py`` (``fp32_groups_flat``), in the
model file under ``optimizer``.
"""

from __future__ import annotations

from typing import Any

import torch

from xhf_hooks.sources.checkpoint.regions import Region, Regions, place_of
from xhf_hooks.sources.checkpoint.states import ModelState

_NOT_NAMED = (
    'the fp32 master weights of this run without ZeRO have no names and could not be matched: --dtype float32 '
    'converts the 16-bit weights instead'
)
_SAMPLE = 4096


def stage0_masters(model: ModelState) -> tuple[Regions, list[str]]:
    """Match masters to parameters where shape, order and values are unambiguous.

    Returns:
        The masters, and a warning if some were not matched.
    """
    trained = _parameters(model)
    masters = _masters(model.content.get('optimizer'), list(trained.values()))
    if masters is None:
        return {}, [_NOT_NAMED]
    alike: dict[object, list[torch.Tensor]] = {}
    for master in masters:
        for dtype in {tensor.dtype for tensor in trained.values()}:
            alike.setdefault(_look(master, dtype), []).append(master)
    names: dict[object, list[str]] = {}
    for name, tensor in trained.items():
        names.setdefault(_look(tensor, tensor.dtype), []).append(name)
    found: Regions = {}
    for look, candidates in names.items():
        # Tensors that look alike are in the same order in both, unless one of them has no master
        if len(candidates) == len(alike.get(look, ())):
            for name, master in zip(candidates, alike[look], strict=True):
                found[name] = Region(tuple(master.shape), (master,))
    return found, [] if len(found) == len(masters) else [_NOT_NAMED]


def _look(tensor: torch.Tensor, dtype: torch.dtype) -> object:
    """Shape, dtype and the first values, rounded to the dtype."""
    sample = tensor.reshape(-1)[:_SAMPLE].to(dtype)
    return tensor.shape, dtype, sample.view(torch.int16).numpy().tobytes()


def _parameters(model: ModelState) -> dict[str, torch.Tensor]:
    """The 16-bit parameters of the state dict under their first names."""
    first = set({place_of(t): name for name, t in reversed(model.module.items()) if t.numel()}.values())
    return {
        name: tensor
        for name, tensor in model.module.items()
        if name in first - model.buffer_names and tensor.dtype in (torch.bfloat16, torch.float16)
    }


def _masters(optimizer: Any, trained: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """The masters in the optimizer's order; None if a flat one cannot be split into parameters."""
    optimizer = optimizer if isinstance(optimizer, dict) else {}
    found = [tensor for group in optimizer.get('fp32_groups') or () for tensor in group]
    flat = optimizer.get('fp32_groups_flat') or []
    if flat:
        numels = [tensor.numel() for tensor in trained]
        if len(flat) > 1 or flat[0].numel() != sum(numels):
            return None
        found += [part.view(t.shape) for part, t in zip(flat[0].split(numels), trained, strict=True)]
    return found if all(master.dtype == torch.float32 for master in found) else None
