"""Universal checkpoints, made by DeepSpeed's ``ds_to_universal.py`` for any number of ranks.

``zero/<parameter>/fp32.pt`` holds the full parameter: at stage 3 a flat tensor (``merge_zero3_slices``), else a dict
with the key ``'param'`` (``merge_tp_slices``). The model files beside ``zero`` are copies of the original ones. At
stage 3 ``zero/optimizer_state.pt`` is a copy of rank 0's optimizer file (``_save_optimizer_state_stage3``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.find import FoundCheckpoint
from xhf_hooks.sources.checkpoint.regions import Assembled, Regions, from_zero3, from_zero12
from xhf_hooks.sources.checkpoint.same_save import require_steps_of
from xhf_hooks.sources.checkpoint.states import Evidence, ModelState, OptimState, optimizer_steps
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file
from xhf_hooks.sources.checkpoint.unpickler import LazyTensor
from xhf_hooks.sources.stored_source import Region

_MASTER = 'F32'


def load_universal(found: FoundCheckpoint, models: Sequence[ModelState], *, optimizer_restarted: bool) -> Assembled:
    """Locate the values of each tensor.

    Args:
        optimizer_restarted: See :func:`.same_save.require_one_save`.

    Raises:
        CheckpointError: A file is missing, or belongs to another model, parameter or save.
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
                f'{file}: {first.file.name} has no parameter of this name; remove the folder if it is of another run'
            )
        masters[name] = _region(file, shapes[name])
    if not first.file.name.startswith('zero_pp_rank_'):
        return from_zero12(first, masters)
    optim = _rank0(found.path / 'zero' / 'optimizer_state.pt')
    if not optimizer_restarted:
        require_steps_of(first, optim)
    return from_zero3(models, masters)


def _region(file: Path, shape: tuple[int, ...]) -> Region:
    content = load_torch_file(file)
    tensor = content.get('param') if isinstance(content, dict) else content
    if not isinstance(tensor, LazyTensor) or tensor.dtype != _MASTER or not tensor.is_contiguous:
        raise CheckpointError(f'{file}: does not hold the fp32 values of a parameter; run ds_to_universal.py again')
    if tensor.shape not in (shape, (math.prod(shape),)):
        raise CheckpointError(
            f'{file}: holds a tensor of shape {tensor.shape}, expected {shape}: it is of another model, or the padding '
            f'of its vocabulary was removed; convert the checkpoint that it was made from'
        )
    return Region(shape, _MASTER, (tensor.piece(),) if tensor.numel else ())


def _rank0(file: Path) -> OptimState:
    """The copy of rank 0's optimizer file of stage 3."""
    state = load_torch_file(file)
    groups = state.get('fp32_flat_groups') if isinstance(state, dict) else None
    n_ranks = state.get('partition_count') if isinstance(state, dict) else None
    if not isinstance(groups, list) or type(n_ranks) is not int or n_ranks < 1:
        raise CheckpointError(f'{file}: does not hold the state of a ZeRO-3 optimizer; run ds_to_universal.py again')
    if not all(isinstance(group, LazyTensor) and group.dtype == _MASTER and group.is_contiguous for group in groups):
        raise CheckpointError(f'{file}: does not hold the fp32 weights of a rank; run ds_to_universal.py again')
    steps = optimizer_steps(state.get('optimizer_state_dict'))
    return OptimState(file, 3, n_ranks, tuple(groups), None, Evidence(None, None, steps))
