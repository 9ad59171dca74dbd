"""Checks that the files of a DeepSpeed checkpoint come from one save, each under its own rank's name.

Copying checkpoints may swap, mix or leave behind files, which the weights alone do not show. The metadata compared here
is written by every rank and cheap to read. At stages 1 and 2 the weights are also compared: :mod:`.rounded`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.evidence import Slices
from xhf_hooks.sources.checkpoint.flat_groups import zero3_paddings
from xhf_hooks.sources.checkpoint.states import ModelState, OptimState
from xhf_hooks.sources.piece_reader import PieceReader
from xhf_hooks.sources.pieces import Piece

_DEEPSPEEDS = re.compile(
    r'(?:\w+_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states|(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states'
)
_HINT = 'put the files of one save together'
_ROUND_ROBIN = 'zero_optimization.round_robin_gradients'
#: Resumes that are allowed for: one within gradient accumulation loses the accumulated gradients, which delays a step.
_RESUMES = 4
#: Elements of padding that are read.
_PADDING = 4096


def require_one_save(
    models: Sequence[ModelState],
    optims: Sequence[OptimState],
    reader: PieceReader,
    *,
    optimizer_restarted: bool,
    universal: bool = False,
) -> None:
    """Compare the metadata of the files.

    Args:
        universal: The model files belong to a universal checkpoint, which has no optimizer file per rank.
        optimizer_restarted: The run was resumed without optimizer state, so the optimizer has made fewer steps than
            the run. Optimizer files of an earlier iteration look the same.

    Raises:
        CheckpointError: A file is missing or left over, or comes from another rank or another save.
    """
    if not universal:
        _require_all_ranks(models, optims)
    states: list[ModelState | OptimState] = [*models, *optims]
    _require_own_names(states)
    _same('optimizer step', [(o.file, o.evidence.step) for o in optims])
    _same('numbers of optimizer steps', [(o.file, o.evidence.steps) for o in optims], show=False)
    _same('global_steps', [(m.file, m.evidence.steps) for m in models])
    _same('skipped_steps', [(m.file, m.evidence.skipped) for m in models])
    _same('iteration', [(m.file, m.evidence.iteration) for m in models])
    _same('DeepSpeed version', [(state.file, state.evidence.version) for state in states])
    with_config = [state for state in states if state.evidence.config]
    for key in sorted({key for state in with_config for key in state.evidence.config}):
        _same(f'{key} in ds_config', [(s.file, s.evidence.config.get(key, 'not set')) for s in with_config])
    _same('settings of the optimizer (learning rate, ...)', [(o.file, o.evidence.settings) for o in optims], show=False)
    _same('state of the loss scaler', [(o.file, o.evidence.scaler) for o in optims], show=False)
    _same('shapes of parameters', [(m.file, m.shapes) for m in models], show=False)
    _same('shapes of frozen parameters', [(m.file, m.frozen_shapes) for m in models], show=False)
    if not optims:
        return
    if optims[0].stage == 3:
        _require_first(models)
        if not optimizer_restarted:
            require_steps_of(models[0], optims[0])
        _require_padding(models[0], optims, reader)
    else:
        _require_slices(models[0], optims)


def unproven(models: Sequence[ModelState], optims: Sequence[OptimState]) -> tuple[str, ...]:
    """Statements that the files cannot confirm, for the user to check."""
    if not optims or optims[0].stage != 3:  # at stages 1 and 2 the model file has a copy of the weights
        return ()
    found = []
    states: list[ModelState | OptimState] = [*models, *optims]
    if len(optims) > 1 and any(state.evidence.saved_as != state.file.stem for state in states):
        found.append('not verifiable: only the file names say which rank wrote which file')
    if optims[0].evidence.step is None:
        found.append('not verifiable: the iteration of the weights, since this optimizer counts no steps')
    return tuple(found)


def _require_all_ranks(models: Sequence[ModelState], optims: Sequence[OptimState]) -> None:
    if not optims:
        if models[0].shapes is not None and not any(t.numel for t in models[0].module.values()):
            raise CheckpointError(
                f'{models[0].file}: holds no weights, and there are no *_optim_states.pt files; copy them, too'
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
            f'{first.file.with_name(missing)}: missing: expected files of {first.world_size} ranks, found '
            f'{len(optims)}; copy the others, too'
        )
    if first.world_size < len(optims):
        raise CheckpointError(
            f'{optims[first.world_size].file}: left over from a run of more ranks: {first.file.name} is of a run of '
            f'{first.world_size}; put the files of one save together'
        )
    expected = first.world_size if first.stage == 3 else 1
    if len(models) != expected:
        raise CheckpointError(
            f'{models[0].file}: one of {len(models)} model files, but ZeRO-{first.stage} with {first.world_size} '
            f'ranks writes {expected}; put the files of one save together'
        )
    if models[0].shapes is None or any(len(o.groups) != len(models[0].shapes) for o in optims if o.stage != 3):
        raise CheckpointError(f'{models[0].file}: lacks the shapes of the parameters in {first.file.name}; {_HINT}')


def _require_own_names(states: Sequence[ModelState | OptimState]) -> None:
    """Refuse renamed files: torch.save records the file name in the file (:func:`.torch_file.zip_root`)."""
    for state in states:
        saved_as = state.evidence.saved_as
        if saved_as is not None and saved_as != state.file.stem and _DEEPSPEEDS.fullmatch(saved_as):
            raise CheckpointError(f'{state.file}: was saved as {saved_as}.pt and renamed; restore its name, or {_HINT}')


def _require_first(models: Sequence[ModelState]) -> None:
    """Stage 3: only rank 0 records tied parameters (``runtime/engine.py``, ``_get_shared_params``)."""
    for model in models[1:]:
        if model.shared and not models[0].shared:
            raise CheckpointError(
                f'{model.file}: is the file of rank 0, but {models[0].file.name} is not; {_HINT}, under their names'
            )


def require_steps_of(model: ModelState, optim: OptimState) -> None:
    """Stage 3: check that the optimizer files, which have the weights, are from the model file's step."""
    told, config = model.evidence, model.evidence.config
    made, accumulation = optim.evidence.step, config.get('gradient_accumulation_steps', 1)
    if made is None or told.steps is None or told.skipped is None or config.get('torch_autocast.enabled'):
        return  # torch's GradScaler skips steps without counting them
    if made == told.steps - told.skipped:
        return
    if told.iteration is not None and type(accumulation) is int and accumulation > 0:
        # MMEngine's load_from: global_steps continues from the loaded run, the optimizer starts from 0
        begun = told.iteration // accumulation
        if begun - told.skipped - (_RESUMES if accumulation > 1 else 0) <= made <= begun:
            return
    raise CheckpointError(
        f'{optim.file}: not of one save: its optimizer has made {made:.0f} steps, but {model.file.name} is of step '
        f'{told.steps} with {told.skipped} skipped; put the files of one iteration together, or, if the run was '
        f'resumed without optimizer state, add --optimizer-restarted'
    )


def _require_padding(model: ModelState, optims: Sequence[OptimState], reader: PieceReader) -> None:
    """Stage 3, for files that do not record their names: moments are 0 in the padding of the last ranks' slices.

    The padding of the weights is uninitialised memory (``zero/partition_parameters.py``, ``_partition_param``).
    """
    if all(optim.evidence.saved_as == optim.file.stem for optim in optims) or not all(map(_has_moments, optims)):
        return
    for rank, (optim, ranges) in enumerate(
        zip(optims, zero3_paddings(model.shapes or (), len(optims), _PADDING), strict=True)
    ):
        if not ranges or _untouched(optim, ranges, reader):
            continue
        for other in optims[:rank]:
            if _untouched(other, ranges, reader):
                raise CheckpointError(
                    f'{optim.file}: has no padding at its end, but {other.file.name} has that of this rank: they are '
                    f'swapped; {_HINT}, each under its own name'
                )


def _has_moments(optim: OptimState) -> bool:
    """Whether there are moments, and no L2 regularisation, which would also change the padding."""
    decay = any(s.get('weight_decay') and not s.get('decoupled_weight_decay') for s in optim.evidence.settings)
    sizes = [group.numel for group in optim.groups]
    return not decay and sizes == [moment.numel for moment in optim.evidence.moments]


def _untouched(optim: OptimState, ranges: Sequence[tuple[int, int]], reader: PieceReader) -> bool:
    pieces: list[Piece] = [moment.piece() for moment in optim.evidence.moments]
    for start, end in ranges:
        values = torch.empty(end - start)
        reader.read_into(pieces, start, values)
        if values.any():
            return False
    return True


def _require_slices(model: ModelState, optims: Sequence[OptimState]) -> None:
    """Stages 1 and 2: compare the parts that each rank records; ``round_robin_gradients`` orders them differently."""
    if any(o.paddings is not None or o.evidence.config.get(_ROUND_ROBIN) for o in optims):
        return
    for index, shapes in enumerate(model.shapes or ()):
        share = optims[0].groups[index].numel
        for rank, optim in enumerate(optims):
            recorded = optim.evidence.slices
            if recorded is None or len(recorded) <= index:
                continue
            expected = _expected_slices(shapes, rank * share, (rank + 1) * share)
            if recorded[index] != expected:
                name = next(iter(recorded[index].items() ^ expected.items()))[0]
                raise CheckpointError(
                    f'{optim.file}: holds another part of {name} than rank {rank} of {len(optims)} ranks; {_HINT}, '
                    f'each under its own name'
                )


def _expected_slices(shapes: dict[str, tuple[int, ...]], start: int, end: int) -> Slices:
    found: Slices = {}
    position = 0
    for name, shape in shapes.items():
        begin, stop = max(start, position), min(end, position + math.prod(shape))
        if begin < stop:
            found[name] = (begin - start, stop - begin)
        position += math.prod(shape)
    return found


def _same(what: str, values: Sequence[tuple[Path, Any]], *, show: bool = True) -> None:
    told_by = [(file, value) for file, value in values if value is not None]
    for file, value in told_by[1:]:
        if value != told_by[0][1]:
            other = told_by[0][0].name
            told = f'{what} {value}, but {other} has {told_by[0][1]}' if show else f'other {what} than {other}'
            raise CheckpointError(f'{file}: has {told}: not of one save; put the files of one iteration together')
