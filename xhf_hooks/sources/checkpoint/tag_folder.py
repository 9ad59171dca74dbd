"""Which files of a DeepSpeed tag folder make up its checkpoint, by their names.

The names are those of DeepSpeed ``runtime/engine.py`` (``_get_ckpt_name``, ``_get_rank_zero_ckpt_name``,
``_get_expert_ckpt_name``, ``_get_optimizer_ckpt_name``), ``runtime/pipe/module.py`` (``ckpt_layer_path``) and
``checkpoint/ds_to_universal.py`` (``main``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.found import FoundCheckpoint
from xhf_hooks.sources.checkpoint.states import load_model_state, load_optim_state

_RANK = r'(?P<rank>0|[1-9][0-9]{0,6})'  # as str(int) writes it, in ASCII
_MODEL = re.compile(rf'(?:zero_pp_rank_{_RANK}_)?mp_rank_00_model_states\.pt')
_OPTIM = re.compile(rf'(?P<prefix>bf16_)?zero_pp_rank_{_RANK}_mp_rank_00_optim_states\.pt')
_LIKE_THEM = re.compile(r'.*mp_rank_.*_(?:model|optim)_states\.pt')
_DEEPSPEED = "DeepSpeed's load_checkpoint reads it, in a run of the same kind"
_UNSUPPORTED = (
    (re.compile(r'layer_[0-9]+_expert_[0-9]+_.*|expp_rank_[0-9]+_.*'), 'expert parallelism'),
    (re.compile(r'layer_[0-9]+-.*model_states\.pt'), 'pipeline parallelism'),
    (
        re.compile(r'(?:(?:bf16_)?zero_pp_rank_[0-9]+_)?mp_rank_(?!00_)[0-9]{2,4}_(?:model|optim)_states\.pt'),
        'tensor parallelism',
    ),
)
_MODEL_OF = 'zero_pp_rank_{}_mp_rank_00_model_states.pt'
_OPTIM_OF = '{}zero_pp_rank_{}_mp_rank_00_optim_states.pt'

Files = Mapping[int, Path]


def is_part(name: str) -> bool:
    """Whether a file of this name lies in tag folders."""
    return _LIKE_THEM.fullmatch(name) is not None or any(pattern.fullmatch(name) for pattern, _ in _UNSUPPORTED)


def is_universal(folder: Path) -> bool:
    """Whether ``ds_to_universal.py`` has written into this folder."""
    return next(folder.glob('zero/*/fp32.pt'), None) is not None


def find_parts(given: Path, folder: Path) -> FoundCheckpoint:
    """The files of the checkpoint in a tag folder.

    Raises:
        CheckpointError: Some are missing, left over, or of a way to train that is not supported.
    """
    whole, models, optims, prefixes = _sorted_out(folder)
    universal = not optims and is_universal(folder)
    if whole is None and not models and not optims:
        raise CheckpointError(
            f'{folder}: ds_to_universal.py did not finish here: no *_model_states.pt is beside zero; run it again'
            if universal
            else f'{folder}: not a checkpoint: holds no *_model_states.pt; give one that does'
        )
    if whole is not None and models:
        raise CheckpointError(f'{whole}: ZeRO-3 files lie beside it, left by another run; remove one or the other')
    if len(prefixes) > 1:
        one, other = list(prefixes.values())[:2]
        raise CheckpointError(f'{one}: {other.name} is of another precision; remove what another run has left')
    prefix = next(iter(prefixes), '')
    _check_complete(folder, whole, models, optims, prefix, universal=universal)
    model_files = (whole,) if whole is not None else tuple(models[rank] for rank in sorted(models))
    if universal:
        return FoundCheckpoint(given, folder, 'universal', model_files, parameter_files=_parameter_files(folder))
    return FoundCheckpoint(given, folder, _layout(folder), model_files, tuple(optims[rank] for rank in sorted(optims)))


def _sorted_out(folder: Path) -> tuple[Path | None, dict[int, Path], dict[int, Path], dict[str, Path]]:
    """The model file of all ranks, model files by rank, optimizer files by rank, and one of these by prefix."""
    whole = None
    models: dict[int, Path] = {}
    optims: dict[int, Path] = {}
    prefixes: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        refuse_unsupported(file)
        if match := _MODEL.fullmatch(file.name):
            if match['rank'] is None:
                whole = file
            else:
                models[int(match['rank'])] = file
        elif match := _OPTIM.fullmatch(file.name):
            optims[int(match['rank'])] = file
            prefixes[match['prefix'] or ''] = file
        elif _LIKE_THEM.fullmatch(file.name):
            raise CheckpointError(
                f'{file}: DeepSpeed writes no file of this name, but such as {_MODEL_OF.format(1)}; remove it, or give '
                f'it the name that it had'
            )
    return whole, models, optims, prefixes


def refuse_unsupported(file: Path) -> None:
    """Raise for a file of a way to train that is not supported."""
    for pattern, what in _UNSUPPORTED:
        if pattern.fullmatch(file.name):
            raise CheckpointError(f'{file}: of a run with {what}, which is not supported here; {_DEEPSPEED}')


def _check_complete(
    folder: Path, whole: Path | None, models: Files, optims: Files, prefix: str, *, universal: bool
) -> None:
    """Every rank's files are there, and no others. What one of them says of the number of ranks settles it."""
    n_ranks = 1 + max([*models, *optims], default=-1)
    needed = [] if whole is not None else [models]
    needed += [] if universal or (whole is not None and not optims) else [optims]
    if all(files.keys() == set(range(n_ranks)) for files in needed):
        return
    teller, n_ranks, stage = _number_of_ranks(models, optims)
    if teller is None:
        ranks = ', '.join(map(str, sorted({*models, *optims})))
        raise CheckpointError(
            f'{folder}: has files of the ranks {ranks}, some of them alone; copy what is missing, or remove what '
            f'another run has left'
        )
    for file in (files[rank] for files in (models, optims) for rank in sorted(files) if rank >= n_ranks):
        raise CheckpointError(f'{file}: left by another run, since {teller.name} is of {n_ranks} rank(s); remove it')
    if whole is None and not models and stage != 3:
        raise CheckpointError(
            f'{folder / "mp_rank_00_model_states.pt"}: missing: ZeRO-{stage} writes one; copy it, too'
        )
    for files in needed:
        for rank in range(n_ranks):
            if rank not in files:
                name = _MODEL_OF.format(rank) if files is models else _OPTIM_OF.format(prefix, rank)
                raise CheckpointError(
                    f'{folder / name}: missing: {n_ranks} ranks wrote, as {teller.name} says; copy it, too'
                )


def _number_of_ranks(models: Files, optims: Files) -> tuple[Path | None, int, int]:
    """The first file that tells it, what it tells, and the ZeRO stage."""
    for rank in sorted(optims):
        try:
            state = load_optim_state(optims[rank])
        except CheckpointError:  # the next one may tell
            continue
        return optims[rank], state.world_size, state.stage
    for rank in sorted(models):
        try:
            n_ranks = load_model_state(models[rank]).content.get('dp_world_size')
        except CheckpointError:
            continue
        if type(n_ranks) is int and n_ranks > 0:
            return models[rank], n_ranks, 3
    return None, 0, 0


def _parameter_files(folder: Path) -> dict[str, Path]:
    """The fp32 values that ``ds_to_universal.py`` has put together, each in a folder named after its parameter."""
    found = {entry.name: entry / 'fp32.pt' for entry in sorted((folder / 'zero').iterdir()) if entry.is_dir()}
    for file in found.values():
        if not file.exists():
            raise CheckpointError(f'{file}: missing; copy it, too, or run ds_to_universal.py again')
    return found


def _layout(folder: Path) -> str:
    if folder.suffix == '.pth':
        return 'mmengine'
    if re.fullmatch(r'checkpoint-[0-9]+', folder.absolute().parent.name):
        return 'trainer'
    return 'accelerate' if folder.name.startswith('pytorch_model') else 'deepspeed'
