"""Checks that the files of a DeepSpeed checkpoint come from one save, each under its own rank's name.

Copying checkpoints may swap, mix or leave behind files, which the weights alone do not show. What is compared here is
written by every rank and cheap to read; it cannot tell two runs of equal steps apart (:func:`unproven`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.states import ModelState, OptimState

_DEEPSPEEDS = re.compile(r'(?:\w+_)?zero_pp_rank_\d+_mp_rank_\d+_\w+_states|mp_rank_\d+_model_states')
_HINT = 'put the files of one save together'
#: Resumes that are allowed for: one within gradient accumulation loses the accumulated gradients, which delays a step.
_RESUMES = 4


def require_all_ranks(models: Sequence[ModelState], optims: Sequence[OptimState]) -> None:
    """Check that the files of all ranks are there and no others, by the number of ranks that the first one records.

    Args:
        models, optims: In the order of ranks.

    Raises:
        CheckpointError: A file is missing, or left over from another run.
    """
    if not optims:
        if models[0].shapes is not None and not any(tensor.numel() for tensor in models[0].module.values()):
            raise CheckpointError(
                f'{models[0].file}: holds no weights, and there are no *_optim_states.pt files; copy them, too'
            )
        return
    first = optims[0]
    for states, n_ranks in ((optims, first.world_size), (models, first.world_size if first.stage == 3 else 1)):
        expected = [re.sub(r'rank_\d+_mp', f'rank_{rank}_mp', states[0].file.name) for rank in range(n_ranks)]
        names = [state.file.name for state in states]
        for name in expected:
            if name not in names:
                raise CheckpointError(
                    f'{first.file.with_name(name)}: missing: {first.file.name} is of a run of {n_ranks} ranks; copy '
                    f'it, too'
                )
        for name in names[len(expected) :]:
            raise CheckpointError(
                f'{first.file.with_name(name)}: left over from another run: {first.file.name} is of ZeRO-{first.stage} '
                f'with {first.world_size} ranks; {_HINT}'
            )


def require_one_save(models: Sequence[ModelState], optims: Sequence[OptimState], *, optimizer_restarted: bool) -> None:
    """Compare what the files say of their save.

    Args:
        optims: In the order of ranks; none for a universal checkpoint.
        optimizer_restarted: The run was resumed without optimizer state, so the optimizer has made fewer steps than
            the run. Optimizer files of an earlier iteration look the same.

    Raises:
        CheckpointError: A file comes from another rank or another save.
    """
    states: list[ModelState | OptimState] = [*models, *optims]
    for state in states:
        if state.saved_as not in (None, state.file.stem) and _DEEPSPEEDS.fullmatch(str(state.saved_as)):
            raise CheckpointError(
                f'{state.file}: was saved as {state.saved_as}.pt and renamed; restore its name, or {_HINT}'
            )
    _same('ZeRO stage', ((o.file, o.stage) for o in optims))
    _same('number of ranks', ((o.file, o.world_size) for o in optims))
    _same('optimizer step', ((o.file, o.steps) for o in optims))
    for number, what in enumerate(('global_steps', 'skipped_steps', 'iteration')):
        _same(what, ((m.file, m.steps[number]) for m in models))
    _same('DeepSpeed version', ((state.file, state.version) for state in states))
    _same('shapes of parameters', ((m.file, [m.shapes, m.frozen_shapes]) for m in models), show=False)
    if optims and optims[0].stage == 3 and not optimizer_restarted:
        require_steps_of(models[0], optims[0])


def unproven(models: Sequence[ModelState], optims: Sequence[OptimState], *, universal: bool) -> tuple[str, ...]:
    """Statements that the files cannot confirm, for the user to check."""
    found = ['not verifiable: that all files are of one run; they agree on ranks, steps and shapes, and name no run']
    if universal:
        return tuple(found)
    if len(optims) < 2:
        return ()
    if any(optim.saved_as != optim.file.stem for optim in optims):
        found.append('not verifiable: only the file names say which rank wrote which file')
    if optims[0].steps is None or not _is_of_step(models[0], optims[0]):
        found.append('not verifiable: the iteration of the fp32 master weights, by the steps of their optimizer')
    return tuple(found)


def require_steps_of(model: ModelState, optim: OptimState) -> None:
    """Stage 3: check that the optimizer files, which have the weights, are from the model file's step."""
    if not _is_of_step(model, optim):
        raise CheckpointError(
            f'{optim.file}: not of one save: its optimizer has made {optim.steps:.0f} steps, but {model.file.name} is '
            f'of step {model.steps[0]} with {model.steps[1]} skipped; put the files of one iteration together, or, if '
            f'the run was resumed without optimizer state, add --optimizer-restarted'
        )


def _is_of_step(model: ModelState, optim: OptimState) -> bool:
    """Whether the optimizer has made the steps of the model file, or one of them does not count."""
    steps, skipped, iteration = model.steps
    config = model.content.get('ds_config')
    config = config if isinstance(config, dict) else {}
    autocast = config.get('torch_autocast')
    if optim.steps is None or steps is None or skipped is None or optim.steps == steps - skipped:
        return True
    if isinstance(autocast, dict) and autocast.get('enabled'):
        return True  # torch's GradScaler skips steps without counting them
    if iteration is None:
        return False
    # MMEngine's load_from: global_steps continues from the loaded run, the optimizer starts from 0
    accumulation = config.get('gradient_accumulation_steps') or 1
    begun = iteration // accumulation
    return begun - skipped - (_RESUMES if accumulation > 1 else 0) <= optim.steps <= begun


def _same(what: str, values: Iterable[tuple[Path, Any]], *, show: bool = True) -> None:
    (first, expected), *others = [(file, value) for file, value in values if value is not None] or [(None, None)]
    for file, value in others:
        if value != expected:
            told = f'{what} {value}, but {first.name} has {expected}' if show else f'other {what} than {first.name}'
            raise CheckpointError(f'{file}: has {told}: not of one save; {_HINT}')
