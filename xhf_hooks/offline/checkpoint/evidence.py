"""Evidence that the files of a DeepSpeed checkpoint come from one save, each under its own rank's name.

Copying checkpoints may swap, mix or leave behind files, which the weights alone do not show. What is compared here is
written by every rank and cheap to read; it cannot tell two runs of equal steps apart (:func:`unproven`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.compat.deepspeed import n_steps_before_training
from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.text import counted
from xhf_hooks.offline.checkpoint.states import ModelState, OptimState
from xhf_hooks.sources.stored_tensors import StoredTensor
from xhf_hooks.system.versions import version_numbers

_DEEPSPEEDS = re.compile(r'(?:\w+_)?zero_pp_rank_\d+_mp_rank_\d+_\w+_states|mp_rank_\d+_model_states')
_HINT = 'put the files of one save together'


def require_one_save(models: Sequence[ModelState], optims: Sequence[OptimState]) -> None:
    """Check that the files of all ranks are there, and compare what they say of their save.

    Args:
        models, optims: In the order of ranks.

    Raises:
        CheckpointError: A file is missing, or comes from another rank or another save.
    """
    _require_all_ranks(models, optims)
    states: list[ModelState | OptimState] = [*models, *optims]
    for state in states:
        if state.saved_as != state.file.stem and _DEEPSPEEDS.fullmatch(state.saved_as):
            raise CheckpointError(
                f'{state.file}: was saved as {state.saved_as}.pt and renamed; restore its name, or {_HINT}'
            )
    _same('ZeRO stage', ((o.file, o.stage) for o in optims))
    _same('number of ranks', ((o.file, o.world_size) for o in optims))
    _same('optimizer step', ((o.file, o.steps) for o in optims))
    _same('global_steps', ((m.file, m.steps) for m in models))
    _same('DeepSpeed version', ((state.file, state.version) for state in states))
    _same('shapes of parameters', ((m.file, [m.shapes, m.frozen_shapes]) for m in models))


def _require_all_ranks(models: Sequence[ModelState], optims: Sequence[OptimState]) -> None:
    """Check that there are the files of as many ranks as the first one records, and no others."""
    if not optims:
        trained = {name: shape for group in models[0].shapes or () for name, shape in group.items()}
        weights = models[0].module
        if any(0 not in shape and name in weights and not weights[name].numel() for name, shape in trained.items()):
            raise CheckpointError(
                f'{models[0].file}: its weights are in *_optim_states.pt files, which are missing; copy them, too'
            )
        return
    first = optims[0]
    for states, n_ranks in ((optims, first.world_size), (models, first.world_size if first.stage == 3 else 1)):
        expected = [re.sub(r'rank_\d+_mp', f'rank_{rank}_mp', states[0].file.name) for rank in range(n_ranks)]
        # With Ulysses, older versions of DeepSpeed count sequence ranks there
        names = [re.sub(r'_mp_rank_\d+', '_mp_rank_00', state.file.name) for state in states]
        for name in [*expected, *names]:
            if name not in names or name not in expected:
                what, remedy = ('left over from another run', _HINT) if name in names else ('missing', 'copy it, too')
                raise CheckpointError(
                    f'{first.file.with_name(name)}: {what}: {first.file.name} is of ZeRO-{first.stage} with '
                    f'{counted(first.world_size, "rank")}; {remedy}'
                )


def unproven(optims: Sequence[OptimState]) -> tuple[str, ...]:
    """What the files cannot show, and when that matters."""
    if len(optims) < 2:
        return ()
    found = [
        'all files agree on ranks, steps and shapes. Not checked: that they are of one run, which DeepSpeed does not '
        'record. This matters only if files of several runs were copied together'
    ]
    if any(optim.saved_as != optim.file.stem for optim in optims):
        found.append(
            'not checked: which rank wrote which file, since only their names say so. '
            'This matters only if they were renamed'
        )
    return tuple(found)


def judge_steps(
    models: Sequence[ModelState], optims: Sequence[OptimState], tensors: Sequence[StoredTensor]
) -> list[str]:
    """A warning if nothing shows that model and optimizer files are of one step, whose numbers differ.

    After a resume without optimizer state they differ, too; then the 16-bit weights are the rounded fp32 ones.

    Raises:
        CheckpointError: The weights in the files differ, too.
    """
    if not optims:
        return []
    counted, version = optims[0].steps, optims[0].version
    before_training = n_steps_before_training(None if version is None else version_numbers(version))
    made = None if counted is None else counted - before_training
    if counted is not None and models[0].steps in (None, counted, made):
        return []
    steps = f'the optimizer of {optims[0].file} has made {made} steps, {models[0].file.name} {models[0].steps}'
    in_both = [tensor for tensor in tensors if tensor.master is not None and tensor.master is not tensor.trained]
    for tensor in in_both:
        rounded = tensor.whole(from_master=True).to(TORCH_DTYPES[tensor.dtype])
        if not torch.equal(rounded, tensor.whole(from_master=False)):
            raise CheckpointError(
                f'{steps}, and {tensor.name} differs: not of one save; put the files of one save together'
            )
    if in_both:
        return []
    return [
        f'could not verify that model and optimizer files are of one step: {steps}. This is normal after a resume '
        f'without optimizer state, and with optimizers that do not count steps; otherwise put the files of one save '
        f'together'
    ]


def _same(what: str, values: Iterable[tuple[Path, Any]]) -> None:
    known = [(file, value) for file, value in values if value is not None]
    for file, value in known[1:]:
        first, expected = known[0]
        if value != expected:
            shown, wanted = str(value)[:60], str(expected)[:60]
            raise CheckpointError(
                f'{file}: has {what} {shown}, but {first.name} has {wanted}: not of one save; {_HINT}'
            )
