"""Universal checkpoints, made by DeepSpeed's ``ds_to_universal.py`` for any number of ranks.

``zero/<parameter>/fp32.pt`` holds the full parameter: at stage 3 a flat tensor (``merge_zero3_slices``), else a dict
with the key ``'param'`` (``merge_tp_slices``). The model files beside ``zero`` are copies of the original ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.find import FoundCheckpoint
from xhf_hooks.sources.checkpoint.regions import Assembled, Region, from_zero3, from_zero12
from xhf_hooks.sources.checkpoint.states import ModelState
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file


def load_universal(found: FoundCheckpoint, models: Sequence[ModelState]) -> Assembled:
    """Locate the values of each tensor.

    Raises:
        CheckpointError: A file is missing, or belongs to another model or parameter.
    """
    first, zero = models[0], found.path / 'zero'
    shapes = {name: shape for group in first.shapes or () for name, shape in group.items()}
    for name in shapes.keys() ^ found.parameter_files.keys():
        where = first.file.name if name in shapes else zero
        raise CheckpointError(f'{zero / name}: only {where} has this parameter; copy the folders of one save')
    masters = {name: _region(file, shapes[name]) for name, file in found.parameter_files.items()}
    if first.file.name.startswith('zero_pp_rank_'):
        return from_zero3(models, masters)
    return from_zero12(first, masters)


def _region(file: Path, shape: tuple[int, ...]) -> Region:
    content = load_torch_file(file)
    tensor = content.get('param') if isinstance(content, dict) else content
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) not in (shape, (math.prod(shape),)):
        raise CheckpointError(
            f'{file}: does not hold a parameter of shape {shape}: it is of another model, or the padding of its '
            f'vocabulary was removed; convert the checkpoint that it was made from'
        )
    return Region(shape, (tensor,) if tensor.numel() else ())
