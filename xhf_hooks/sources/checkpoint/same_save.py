"""Checks that the files of a DeepSpeed checkpoint come from one save, each under its own rank's name.

Copying checkpoints may swap, mix or leave behind files, which the weights alone do not show. What is compared here is
written by every rank and cheap to read; it cannot tell two runs of equal steps apart (:func:`unproven`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.states import ModelState, OptimState

_DEEPSPEEDS = re.compile(
    r'(?:\w+_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states|(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states'
)
_HINT = 'put the files of one save together'
#: Resumes that are allowed for: one within gradient accumulation loses the accumulated gradients, which delays a step.
_RESUMES = 4


def require_one_save(
    models: Sequence[ModelState],
    optims: Sequence[OptimState],
    *,
    optimizer_restarted: bool,
    universal: bool = False,
) -> None:
    """Compare what the files say of their save.

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
    for state in states:
        _require_own_name(state)
    _same('optimizer step', [(o.file, o.evidence.steps) for o in optims])
    _same('global_steps', [(m.file, m.evidence.steps) for m in models])
    _same('skipped_steps', [(m.file, m.evidence.skipped) for m in models])
    _same('iteration', [(m.file, m.evidence.iteration) for m in models])
    _same('DeepSpeed version', [(state.file, state.evidence.version) for state in states])
    _same('shapes of parameters', [(m.file, m.shapes) for m in models], show=False)
    _same('shapes of frozen parameters', [(m.file, m.frozen_shapes) for m in models], show=False)
    if optims and optims[0].stage == 3 and not optimizer_restarted:
        require_steps_of(models[0], optims[0])


def unproven(models: Sequence[ModelState], optims: Sequence[OptimState], *, universal: bool) -> tuple[str, ...]:
    """Statements that the files cannot confirm, for the user to check."""
    found = ['not verifiable: that all files are of one run; they agree on ranks, steps and shapes, and name no run']
    if universal:
        return tuple(found)
    if len(optims) < 2:
        return ()
    if any(optim.evidence.saved_as != optim.file.stem for optim in optims):
        found.append('not verifiable: only the file names say which rank wrote which file')
    if optims[0].stage != 3 and not _is_of_step(models[0], optims[0]):
        made = f'{optims[0].evidence.steps:.0f}'
        found.append(f'not verifiable: the iteration of the fp32 master weights, whose optimizer has made {made} steps')
    if optims[0].evidence.steps is None:
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


def _require_own_name(state: ModelState | OptimState) -> None:
    """Refuse a renamed file: torch.save records the file name in the file (:func:`.torch_file.zip_root`)."""
    saved_as = state.evidence.saved_as
    if saved_as is not None and saved_as != state.file.stem and _DEEPSPEEDS.fullmatch(saved_as):
        raise CheckpointError(f'{state.file}: was saved as {saved_as}.pt and renamed; restore its name, or {_HINT}')


def require_steps_of(model: ModelState, optim: OptimState) -> None:
    """Stage 3: check that the optimizer files, which have the weights, are from the model file's step."""
    if not _is_of_step(model, optim):
        told = model.evidence
        raise CheckpointError(
            f'{optim.file}: not of one save: its optimizer has made {optim.evidence.steps:.0f} steps, but '
            f'{model.file.name} is of step {told.steps} with {told.skipped} skipped; put the files of one iteration '
            f'together, or, if the run was resumed without optimizer state, add --optimizer-restarted'
        )


def _is_of_step(model: ModelState, optim: OptimState) -> bool:
    """Whether the optimizer has made the steps of the model file, or one of them does not count."""
    told, made, config = model.evidence, optim.evidence.steps, model.content.get('ds_config')
    config = config if isinstance(config, dict) else {}
    autocast = config.get('torch_autocast')
    if made is None or told.steps is None or told.skipped is None:
        return True
    if isinstance(autocast, dict) and autocast.get('enabled'):
        return True  # torch's GradScaler skips steps without counting them
    if made == told.steps - told.skipped:
        return True
    accumulation = config.get('gradient_accumulation_steps', 1)
    if told.iteration is not None and type(accumulation) is int and accumulation > 0:
        # MMEngine's load_from: global_steps continues from the loaded run, the optimizer starts from 0
        begun = told.iteration // accumulation
        return begun - told.skipped - (_RESUMES if accumulation > 1 else 0) <= made <= begun
    return False


def _same(what: str, values: Sequence[tuple[Path, Any]], *, show: bool = True) -> None:
    told_by = [(file, value) for file, value in values if value is not None]
    for file, value in told_by[1:]:
        if value != told_by[0][1]:
            other = told_by[0][0].name
            told = f'{what} {value}, but {other} has {told_by[0][1]}' if show else f'other {what} than {other}'
            raise CheckpointError(f'{file}: has {told}: not of one save; put the files of one iteration together')
