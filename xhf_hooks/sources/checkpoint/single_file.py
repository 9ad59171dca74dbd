"""One file with all weights: a ``.pth`` of MMEngine's Runner, or any state dict that torch.save wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.tensors import LazyTensor
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file

#: Where the state dict is: MMEngine, DeepSpeed (also save_16bit_model's), many trainers.
_KEYS = ('state_dict', 'module', 'model')


def load_single_file(file: Path) -> tuple[Mapping[str, Any], dict[str, LazyTensor]]:
    """The whole content, and the state dict in it.

    Raises:
        CheckpointError: There is no state dict in it.
    """
    content = load_torch_file(file)
    if not isinstance(content, dict):
        raise CheckpointError(
            f'{file}: holds a {type(content).__name__}, not a checkpoint; give a .pth with a state_dict'
        )
    candidates = [content[key] for key in _KEYS if isinstance(content.get(key), dict)]
    for candidate in [*candidates, content]:
        tensors = {name: t for name, t in candidate.items() if isinstance(t, LazyTensor) and isinstance(name, str)}
        if tensors:
            return content, tensors
    raise CheckpointError(f'{file}: no weights under {", ".join(_KEYS)} or at the top; give a file with a state dict')
