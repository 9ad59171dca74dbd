"""Universal checkpoints, which DeepSpeed's ``ds_to_universal.py`` makes of others, for any number of ranks.

``zero/<parameter>/fp32.pt`` holds the whole parameter: at stage 3 a flat tensor (``merge_zero3_slices``), else a dict
with it under ``'param'`` (``merge_tp_slices``). The model files beside ``zero`` are copies of the original ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.assemble import Assembled, from_masters
from xhf_hooks.sources.checkpoint.flat_groups import Regions
from xhf_hooks.sources.checkpoint.records import FoundCheckpoint, Region
from xhf_hooks.sources.checkpoint.states import ModelState
from xhf_hooks.sources.checkpoint.tensors import LazyTensor
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file

_MASTER = 'F32'


def load_universal(found: FoundCheckpoint, models: Sequence[ModelState]) -> Assembled:
    """Where each tensor's values are.

    Raises:
        CheckpointError: A file is missing, or of another model.
    """
    first = models[0]
    shapes = {name: shape for group in first.shapes or () for name, shape in group.items()}
    lacking = [name for name in shapes if name not in found.parameter_files]
    if lacking:
        raise CheckpointError(
            f'{found.path / "zero"}: has no folder {lacking[0]!r}, a parameter of {first.file.name}; copy it, too'
        )
    masters: Regions = {}
    for name, file in found.parameter_files.items():
        if name not in shapes:
            raise CheckpointError(
                f'{file}: no parameter of {first.file.name} has this name; remove what another run has left'
            )
        masters[name] = _region(file, shapes[name])
    return from_masters(models, masters)


def _region(file: Path, shape: tuple[int, ...]) -> Region:
    content = load_torch_file(file)
    tensor = content.get('param') if isinstance(content, dict) else content
    if not isinstance(tensor, LazyTensor) or tensor.dtype != _MASTER or not tensor.is_contiguous:
        raise CheckpointError(f'{file}: does not hold the fp32 values of a parameter; run ds_to_universal.py again')
    if tensor.shape not in (shape, (math.prod(shape),)):
        raise CheckpointError(
            f'{file}: holds a tensor of shape {tensor.shape}, expected {shape}: of another model, or of a vocabulary '
            f'whose padding was cut off; take the checkpoint that it was made of'
        )
    return Region(shape, _MASTER, (tensor.piece(),) if tensor.numel else ())
