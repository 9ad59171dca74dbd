"""The states that DeepSpeed writes, file by file, checked to be of one save.

Keys: ``runtime/engine.py`` (``_common_checkpoint_state``, ``_save_zero_checkpoint``) and the optimizers'
``state_dict``; see :mod:`.flat_groups`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.regular_files import open_regular
from xhf_hooks.sources.checkpoint.inert import as_data, as_int
from xhf_hooks.sources.checkpoint.records import FoundCheckpoint
from xhf_hooks.sources.checkpoint.tensors import LazyTensor
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file

Shapes = dict[str, tuple[int, ...]]
_PARTITIONS = 'single_partition_of_fp32_groups'
_FLAT_KEYS = {0: _PARTITIONS, 1: _PARTITIONS, 2: _PARTITIONS, 3: 'fp32_flat_groups'}


@dataclass(frozen=True)
class ModelState:
    """A ``*_model_states.pt`` file.

    Attributes:
        content: The whole of it, as data.
        shapes: Of the trained parameters, by optimizer group, in the order of the flat vectors; None without ZeRO.
        frozen_shapes, fragments: Of frozen parameters (stages 2 and 3).
        shared: Alias to the name whose data is stored.
    """

    file: Path
    content: Mapping[str, Any]
    module: dict[str, LazyTensor]
    buffer_names: frozenset[str]
    shapes: tuple[Shapes, ...] | None
    frozen_shapes: Shapes
    fragments: dict[str, LazyTensor]
    shared: dict[str, str]

    @property
    def steps(self) -> int | None:
        """Optimizer steps done."""
        steps = self.content.get('global_steps')
        return steps if type(steps) is int else None

    @property
    def version(self) -> str | None:
        """Of DeepSpeed."""
        version = self.content.get('ds_version')
        return version if isinstance(version, str) else None


@dataclass(frozen=True)
class OptimState:
    """A ``*_optim_states.pt`` file: this rank's part of each fp32 group.

    Attributes:
        paddings: Of each group, elements behind each parameter; None if there are none.
        step: Of the optimizer, None if it has none.
    """

    file: Path
    stage: int
    world_size: int
    groups: tuple[LazyTensor, ...]
    paddings: tuple[tuple[int, ...], ...] | None
    step: float | None
    version: str | None


def load_model_state(file: Path) -> ModelState:
    """Read and check one file.

    Raises:
        CheckpointError: It is not one, or of a way to train that is not supported.
    """
    content = load_torch_file(file)
    if not isinstance(content, dict) or 'module' not in content or 'buffer_names' not in content:
        raise CheckpointError(f'{file}: not a model file of DeepSpeed; give the folder of a checkpoint')
    if content.get('ds_autoep_layers') or content.get('autoep_layers'):
        raise CheckpointError(f'{file}: a run with expert parallelism, which is not supported')
    if (content.get('mp_world_size') or 1) != 1:
        raise CheckpointError(f'{file}: a run with tensor parallelism, which is not supported')
    if not isinstance(content['module'], dict):
        raise CheckpointError(
            f'{file}: has no state dict of the module (pipeline parallelism?), which is not supported'
        )
    content['ds_config'] = as_data(content.get('ds_config'))
    shapes = content.get('param_shapes')
    frozen = content.get('frozen_param_shapes')
    return ModelState(
        file,
        content,
        {name: t for name, t in content['module'].items() if isinstance(t, LazyTensor) and isinstance(name, str)},
        frozenset(name for name in _sequence(file, content['buffer_names'] or ()) if isinstance(name, str)),
        None if shapes is None else tuple(_shapes(file, group) for group in _sequence(file, shapes)),
        {} if frozen is None else _shapes(file, frozen),
        _fragments(file, content.get('frozen_param_fragments')),
        _names(file, content.get('shared_params')),
    )


def load_optim_state(file: Path) -> OptimState:
    """Read and check one file.

    Raises:
        CheckpointError: It is not one, or of a way to train that is not supported.
    """
    content = load_torch_file(file)
    state = content.get('optimizer_state_dict') if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f'{file}: not an optimizer file of DeepSpeed; give the folder of a checkpoint')
    if state.get('ds_zero_partition_groups') is not None:
        raise CheckpointError(f'{file}: a run with expert parallelism, which is not supported')
    # BF16_Optimizer (stage 1 with fp32 gradients, or stage 0) does not say its stage
    stage = as_int(state['zero_stage']) if 'zero_stage' in state else 1
    counts = state.get('partition_count')
    counts = counts if isinstance(counts, list) else [counts]
    if stage not in _FLAT_KEYS or not counts or not all(type(count) is int and count > 0 for count in counts):
        raise CheckpointError(f'{file}: does not say how ZeRO has split the weights; its DeepSpeed is unknown to us')
    if len(set(counts)) > 1:
        raise CheckpointError(f'{file}: groups are split over {counts} ranks (expert parallelism), not supported')
    groups = tuple(_sequence(file, state.get(_FLAT_KEYS[stage])))
    if not all(isinstance(g, LazyTensor) and g.dtype is not None and g.is_contiguous for g in groups):
        raise CheckpointError(f'{file}: has no fp32 weights under {_FLAT_KEYS[stage]!r}; take another checkpoint')
    paddings = state.get('param_alignment_paddings')
    if paddings is not None:
        paddings = tuple(_sizes(file, group) for group in _sequence(file, paddings))
    step = _step(state.get('optimizer_state_dict' if stage == 3 else 'base_optimizer_state'))
    version = content.get('ds_version')
    return OptimState(file, stage, counts[0], groups, paddings, step, version if isinstance(version, str) else None)


def load_states(found: FoundCheckpoint) -> tuple[list[ModelState], list[OptimState]]:
    """All files of a DeepSpeed checkpoint.

    Raises:
        CheckpointError: A file is missing, or the files are not of one save.
    """
    models = [load_model_state(file) for file in found.model_files]
    optims = [load_optim_state(file) for file in found.optim_files]
    _check_ranks(models, optims)
    _same('optimizer step', [(o.file, o.step) for o in optims])
    _same('global_steps', [(m.file, m.steps) for m in models])
    _same('DeepSpeed version', [(state.file, state.version) for state in (*models, *optims)])
    _same('shapes of parameters', [(m.file, m.shapes) for m in models], show=False)
    _same('shapes of frozen parameters', [(m.file, m.frozen_shapes) for m in models], show=False)
    return models, optims


def _check_ranks(models: Sequence[ModelState], optims: Sequence[OptimState]) -> None:
    if not optims:
        if models[0].shapes is not None and not any(t.numel for t in models[0].module.values()):
            raise CheckpointError(
                f'{models[0].file}: holds no weights, and no *_optim_states.pt is beside it; copy them'
            )
        return
    first = optims[0]
    _same('ZeRO stage', [(o.file, o.stage) for o in optims])
    for optim in optims:
        if optim.world_size != first.world_size:
            raise CheckpointError(
                f'{optim.file}: written by a run of {optim.world_size} ranks, {first.file.name} by {first.world_size}; '
                f'put the files of one save together'
            )
    if first.world_size > len(optims):
        missing = first.file.name.replace('rank_0_mp', f'rank_{len(optims)}_mp')
        raise CheckpointError(
            f'{first.file.with_name(missing)}: missing: {first.world_size} ranks wrote, the files of {len(optims)} '
            f'are there; copy the others, too'
        )
    if first.world_size < len(optims):
        raise CheckpointError(
            f'{optims[first.world_size].file}: left from a run of more ranks: {first.file.name} is of '
            f'{first.world_size}; put the files of one save together'
        )
    expected = first.world_size if first.stage == 3 else 1
    if len(models) != expected:
        raise CheckpointError(
            f'{models[0].file}: one of {len(models)} model files, where ZeRO-{first.stage} with {first.world_size} '
            f'ranks writes {expected}; put the files of one save together'
        )
    if models[0].shapes is None or any(len(o.groups) != len(models[0].shapes) for o in optims if o.stage != 3):
        raise CheckpointError(f'{models[0].file}: lacks the shapes of what is in {first.file.name}; not of one save')


def _same(what: str, values: Sequence[tuple[Path, Any]], *, show: bool = True) -> None:
    told_by = [(file, value) for file, value in values if value is not None]
    for file, value in told_by[1:]:
        if value != told_by[0][1]:
            told = f'{what} {value}, {told_by[0][0].name} has {told_by[0][1]}' if show else f'other {what}'
            raise CheckpointError(f'{file}: has {told}: not of one save; put the files of one iteration together')


def _step(state: Any) -> float | None:
    """The step of the first parameter's optimizer state."""
    entries = state.get('state') if isinstance(state, dict) else state
    entries = list(entries.values()) if isinstance(entries, dict) else entries
    first = entries[0] if isinstance(entries, list) and entries else None
    step = first.get('step') if isinstance(first, dict) else None
    if isinstance(step, LazyTensor) and step.numel == 1 and step.dtype == 'F32':
        piece = step.piece()
        with open_regular(piece.file) as file:
            file.seek(piece.offset)
            return struct.unpack('<f', file.read(4))[0]
    return float(step) if type(step) in (int, float) else None


def _shapes(file: Path, shapes: Any) -> Shapes:
    found = {name: _sizes(file, shape) for name, shape in _mapping(file, shapes).items()}
    if not all(isinstance(name, str) for name in found):
        raise CheckpointError(f'{file}: has parameters without a name; take another checkpoint')
    return found


def _sizes(file: Path, sizes: Any) -> tuple[int, ...]:
    if not all(type(size) is int and 0 <= size < 2**63 for size in _sequence(file, sizes)):
        raise CheckpointError(f'{file}: has a parameter whose sizes are not numbers; take another checkpoint')
    return tuple(sizes)


def _fragments(file: Path, fragments: Any) -> dict[str, LazyTensor]:
    found = _mapping(file, fragments)
    if not all(isinstance(t, LazyTensor) and t.is_contiguous and isinstance(n, str) for n, t in found.items()):
        raise CheckpointError(f'{file}: has no proper frozen parameters; take another checkpoint')
    return found


def _names(file: Path, names: Any) -> dict[str, str]:
    found = _mapping(file, names)
    return {alias: name for alias, name in found.items() if isinstance(alias, str) and isinstance(name, str)}


def _mapping(file: Path, value: Any) -> dict[Any, Any]:
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f'{file}: expected a dict by name, found {type(value).__name__}; take another checkpoint')
    return value or {}


def _sequence(file: Path, value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f'{file}: expected a list, found {type(value).__name__}; take another checkpoint')
    return value
