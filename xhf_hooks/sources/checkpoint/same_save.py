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
from xhf_hooks.format.text import counted
from xhf_hooks.sources.checkpoint.states import ModelState, OptimState

_DEEPSPEEDS = re.compile(r'(?:\w+_)?zero_pp_rank_\d+_mp_rank_\d+_\w+_states|mp_rank_\d+_model_states')
_HINT = 'put the files of one save together'


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
        for name in [*expected, *names]:
            if name not in names or name not in expected:
                what, remedy = ('left over from another run', _HINT) if name in names else ('missing', 'copy it, too')
                raise CheckpointError(
                    f'{first.file.with_name(name)}: {what}: {first.file.name} is of ZeRO-{first.stage} with '
                    f'{counted(first.world_size, "rank")}; {remedy}'
                )


def require_one_save(models: Sequence[ModelState], optims: Sequence[OptimState]) -> None:
    """Compare what the files say of their save.

    Args:
        optims: In the order of ranks; none for a universal checkpoint.

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
    _same('global_steps', ((m.file, m.steps) for m in models))
    _same('DeepSpeed version', ((state.file, state.version) for state in states))
    _same('shapes of parameters', ((m.file, [m.shapes, m.frozen_shapes]) for m in models))


def unproven(models: Sequence[ModelState], optims: Sequence[OptimState], *, universal: bool) -> tuple[str, ...]:
    """Statements that the files cannot confirm, for the user to check."""
    found = []
    if universal or len(optims) > 1:
        found.append(
            'not verifiable: that all files are of one run; they agree on ranks, steps and shapes, and name no run'
        )
    if len(optims) > 1 and any(optim.saved_as != optim.file.stem for optim in optims):
        found.append('not verifiable: only the file names say which rank wrote which file')
    if optims and (optims[0].steps is None or models[0].steps not in (None, optims[0].steps)):
        found.append(
            f'not verifiable: the iteration of the fp32 weights: the optimizer of {optims[0].file.name} has made '
            f'{optims[0].steps} steps, {models[0].file.name} {models[0].steps}. That is so after a resume without '
            f'optimizer state; otherwise {_HINT}'
        )
    return tuple(found)


def _same(what: str, values: Iterable[tuple[Path, Any]]) -> None:
    (first, expected), *others = [(file, value) for file, value in values if value is not None] or [(None, None)]
    for file, value in others:
        if value != expected:
            shown, wanted = str(value)[:60], str(expected)[:60]
            raise CheckpointError(
                f'{file}: has {what} {shown}, but {first.name} has {wanted}: not of one save; {_HINT}'
            )
