"""One file with all weights: a ``.pth`` of MMEngine's Runner, or any state dict saved by torch.save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file
from xhf_hooks.sources.checkpoint.unpickler import LazyTensor

#: Keys of the state dict: MMEngine, DeepSpeed (also save_16bit_model), many trainers.
_KEYS = ('state_dict', 'module', 'model')
_MMENGINES, _OF_EMA = _KEYS[0], 'ema_state_dict'


@dataclass(frozen=True)
class SingleFile:
    """The content of one file.

    Attributes:
        content: All of it, as data.
        tensors: Its state dict; for a run with EMAHook, the averaged weights.
        live: The live weights of a run with EMAHook; else None.
    """

    content: Mapping[str, Any]
    tensors: dict[str, LazyTensor]
    live: dict[str, LazyTensor] | None


def load_single_file(file: Path) -> SingleFile:
    """Read the file and find its state dicts.

    Raises:
        CheckpointError: It has no state dict.
    """
    content = load_torch_file(file)
    if not isinstance(content, dict):
        raise CheckpointError(
            f'{file}: holds a {type(content).__name__}, not a checkpoint; give a .pth with a state_dict'
        )
    for key in (*(key for key in _KEYS if isinstance(content.get(key), dict)), None):
        tensors = _tensors(content if key is None else content[key])
        if tensors:
            return SingleFile(content, tensors, _live(content, tensors) if key == _MMENGINES else None)
    raise CheckpointError(f'{file}: no weights under {", ".join(_KEYS)} or at top level; give a file with a state dict')


def _live(content: Mapping[str, Any], averaged: Mapping[str, LazyTensor]) -> dict[str, LazyTensor] | None:
    """MMEngine's EMAHook swaps both before it saves (``hooks/ema_hook.py``, ``_swap_ema_state_dict``)."""
    swapped = _tensors(content[_OF_EMA]) if isinstance(content.get(_OF_EMA), dict) else {}
    found = {name: swapped.get(f'module.{name}') for name in averaged}
    if not any(tensor is not None for tensor in found.values()):
        return None
    return {name: averaged[name] if tensor is None else tensor for name, tensor in found.items()}


def _tensors(state_dict: Mapping[Any, Any]) -> dict[str, LazyTensor]:
    return {name: t for name, t in state_dict.items() if isinstance(t, LazyTensor) and isinstance(name, str)}
