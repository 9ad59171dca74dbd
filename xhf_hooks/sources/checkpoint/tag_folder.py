"""Finds the checkpoint's files in a DeepSpeed tag folder by name.

The names are those of DeepSpeed ``runtime/engine.py`` (``_get_ckpt_name``, ``_get_rank_zero_ckpt_name``,
``_get_expert_ckpt_name``, ``_get_optimizer_ckpt_name``), ``runtime/pipe/module.py`` (``ckpt_layer_path``) and
``checkpoint/ds_to_universal.py`` (``main``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.text import counted
from xhf_hooks.sources.checkpoint.found import FoundCheckpoint
from xhf_hooks.sources.checkpoint.states import load_model_state, load_optim_state

_RANK = r'(?P<rank>0|[1-9][0-9]{0,6})'  # as str(int)
_MODEL = re.compile(rf'(?:zero_pp_rank_{_RANK}_)?mp_rank_00_model_states\.pt')
_OPTIM = re.compile(rf'(?P<prefix>bf16_)?zero_pp_rank_{_RANK}_mp_rank_00_optim_states\.pt')
_LIKE_THEM = re.compile(r'.*mp_rank_.*_(?:model|optim)_states\.pt')
_DEEPSPEED = "load it with DeepSpeed's load_checkpoint in the same kind of run and save the weights from there"
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
    """Whether a file of this name belongs to a tag folder."""
    return _LIKE_THEM.fullmatch(name) is not None or any(pattern.fullmatch(name) for pattern, _ in _UNSUPPORTED)


def is_universal(folder: Path) -> bool:
    """Whether the folder was written by ``ds_to_universal.py``."""
    return next(folder.glob('zero/*/fp32.pt'), None) is not None


def find_parts(given: Path, folder: Path) -> FoundCheckpoint:
    """Find the files of the checkpoint in a tag folder.

    Raises:
        CheckpointError: Files are missing, left over, or of an unsupported training mode.
    """
    whole, models, optims, prefixes = _sorted_out(folder)
    universal = not optims and is_universal(folder)
    if whole is None and not models and not optims:
        raise CheckpointError(
            f'{folder}: ds_to_universal.py did not finish: there is no *_model_states.pt beside zero; run it again'
            if universal
            else f'{folder}: not a checkpoint: it has no *_model_states.pt; give another folder'
        )
    if whole is not None and models:
        raise CheckpointError(f'{whole}: there are also ZeRO-3 files of another run; remove one or the other')
    if len(prefixes) > 1:
        one, other = list(prefixes.values())[:2]
        raise CheckpointError(f'{one}: {other.name} is of a run with another precision; remove the files of one run')
    prefix = next(iter(prefixes), '')
    _check_complete(folder, whole, models, optims, prefix, universal=universal)
    model_files = (whole,) if whole is not None else tuple(models[rank] for rank in sorted(models))
    if universal:
        return FoundCheckpoint(given, folder, 'universal', model_files, parameter_files=_parameter_files(folder))
    return FoundCheckpoint(given, folder, _layout(folder), model_files, tuple(optims[rank] for rank in sorted(optims)))


def _sorted_out(folder: Path) -> tuple[Path | None, dict[int, Path], dict[int, Path], dict[str, Path]]:
    """The single model file, model files by rank, optimizer files by rank, and one of the latter by prefix."""
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
                f'{file}: not a file name of DeepSpeed, such as {_MODEL_OF.format(1)}; remove it, or restore its name'
            )
    return whole, models, optims, prefixes


def refuse_unsupported(file: Path) -> None:
    """Raise for files of unsupported training modes."""
    for pattern, what in _UNSUPPORTED:
        if pattern.fullmatch(file.name):
            raise CheckpointError(f'{file}: of a run with {what}, which is not supported; {_DEEPSPEED}')


def _check_complete(
    folder: Path, whole: Path | None, models: Files, optims: Files, prefix: str, *, universal: bool
) -> None:
    """Check that the files of all ranks are there and no others, by the number of ranks recorded in one of them."""
    n_ranks = 1 + max([*models, *optims], default=-1)
    needed = [] if whole is not None else [models]
    needed += [] if universal or (whole is not None and not optims) else [optims]
    if all(files.keys() == set(range(n_ranks)) for files in needed):
        return
    teller, n_ranks, stage = _number_of_ranks(models, optims)
    if teller is None:
        ranks = ', '.join(map(str, sorted({*models, *optims})))
        raise CheckpointError(
            f'{folder}: has files of the ranks {ranks}, but not all kinds for each; copy the missing files, or remove '
            f'those of another run'
        )
    for file in (files[rank] for files in (models, optims) for rank in sorted(files) if rank >= n_ranks):
        raise CheckpointError(
            f'{file}: left over from another run: {teller.name} is of a run of {counted(n_ranks, "rank")}; remove it'
        )
    if whole is None and not models and stage != 3:
        raise CheckpointError(
            f'{folder / "mp_rank_00_model_states.pt"}: missing: ZeRO-{stage} writes one; copy it, too'
        )
    for files in needed:
        for rank in range(n_ranks):
            if rank not in files:
                name = _MODEL_OF.format(rank) if files is models else _OPTIM_OF.format(prefix, rank)
                raise CheckpointError(
                    f'{folder / name}: missing: {teller.name} is of a run of {n_ranks} ranks; copy it, too'
                )


def _number_of_ranks(models: Files, optims: Files) -> tuple[Path | None, int, int]:
    """The number of ranks and the ZeRO stage, from the first file that can be read."""
    for rank in sorted(optims):
        try:
            state = load_optim_state(optims[rank])
        except CheckpointError:
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
    """The fp32 files of ``ds_to_universal.py`` by parameter, the name of their folder."""
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
