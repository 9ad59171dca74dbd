"""Finds the checkpoint at a path by file names.

The names are those of DeepSpeed ``runtime/engine.py`` (``_get_ckpt_name``, ``_get_rank_zero_ckpt_name``,
``_get_expert_ckpt_name``, ``_get_optimizer_ckpt_name``), ``runtime/pipe/module.py`` (``ckpt_layer_path``) and
``checkpoint/ds_to_universal.py`` (``main``); torch.distributed.checkpoint ``filesystem.py``; Accelerate
``utils/fsdp_utils.py`` (``save_fsdp_model``: a folder, or one file with all weights); MMEngine ``_strategy/fsdp.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.text import counted
from xhf_hooks.sources.checkpoint.states import load_model_state, load_optim_state

_NUMBER = '(0|[1-9][0-9]{0,14})'
_NUMBERED = re.compile(rf'(?:iter_|epoch_|checkpoint-){_NUMBER}(?:\.pth)?')
_DCP_INDEX, _DCP_FILE = '.metadata', re.compile(r'[^/]+\.distcp')
_FSDP_FOLDER, _FSDP_WHOLE = re.compile(rf'pytorch_model_fsdp_{_NUMBER}'), 'pytorch_model_fsdp.bin'
_STRATEGY_FILE = re.compile(r'rank(0|[1-9][0-9]{0,6})\.pth')
_RANK = r'(?P<rank>0|[1-9][0-9]{0,6})'  # as str(int)
_MODEL = re.compile(rf'(?:zero_pp_rank_{_RANK}_)?mp_rank_00_model_states\.pt')
_OPTIM = re.compile(rf'(?P<prefix>bf16_)?zero_pp_rank_{_RANK}_mp_rank_00_optim_states\.pt')
_LIKE_THEM = re.compile(r'.*mp_rank_.*_(?:model|optim)_states\.pt')
_MODEL_OF = 'zero_pp_rank_{}_mp_rank_00_model_states.pt'
_OPTIM_OF = '{}zero_pp_rank_{}_mp_rank_00_optim_states.pt'
_DEEPSPEED = (
    "which is not supported; load it with DeepSpeed's load_checkpoint in the same kind of run and save the weights "
    'from there'
)
_PARTS_UNSUPPORTED = (
    (
        re.compile(r'layer_[0-9]+_expert_[0-9]+_.*|expp_rank_[0-9]+_.*'),
        f'of a run with expert parallelism, {_DEEPSPEED}',
    ),
    (re.compile(r'layer_[0-9]+-.*model_states\.pt'), f'of a run with pipeline parallelism, {_DEEPSPEED}'),
    (
        re.compile(r'(?:(?:bf16_)?zero_pp_rank_[0-9]+_)?mp_rank_(?!00_)[0-9]{2,4}_(?:model|optim)_states\.pt'),
        f'of a run with tensor parallelism, {_DEEPSPEED}',
    ),
)
_UNSUPPORTED = (
    *_PARTS_UNSUPPORTED,
    (
        re.compile(r'pytorch_model_fsdp_(?:[0-9]+_)?rank[0-9]+\.bin'),
        "one rank's part of an FSDP model, in a format that is not supported. Load it with Accelerate's load_state and "
        'save it again with the state dict type SHARDED_STATE_DICT or FULL_STATE_DICT',
    ),
    (
        re.compile(r'__[0-9]+\.metadata'),
        "one rank's index of torch.distributed.checkpoint, saved with use_collectives=False, which is not supported. "
        'Load it with torch.distributed.checkpoint and save it again with use_collectives=True',
    ),
)
_SHOWN = 5

Files = Mapping[int, Path]


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint recognised by its file names.

    Attributes:
        given: The path that the user gave.
        path: The checkpoint: DeepSpeed's tag folder, or one file.
        layout: ``'mmengine'`` (a tag folder ``iter_N.pth`` or ``epoch_N.pth``), ``'deepspeed'`` (``latest`` or a
            tag folder of another name), ``'trainer'`` (``checkpoint-N``, transformers or Axolotl),
            ``'accelerate'`` (``pytorch_model``), ``'universal'`` (made by DeepSpeed's ``ds_to_universal.py``),
            ``'dcp'`` (torch.distributed.checkpoint), or ``'file'`` (one ``.pth`` with all weights).
        model_files: ``*_model_states.pt`` in rank order (one at stages 0 to 2), the ``.distcp`` files sorted by name,
            or the one file.
        optim_files: ``*_optim_states.pt`` in rank order; DeepSpeed's layouts only.
        parameter_files: Parameter name to the file of its fp32 values; ``'universal'`` only.
    """

    given: Path
    path: Path
    layout: str
    model_files: tuple[Path, ...]
    optim_files: tuple[Path, ...] = ()
    parameter_files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Total size of these files."""
        files = (*self.model_files, *self.optim_files, *self.parameter_files.values())
        return sum(file.stat().st_size for file in files)


def find_checkpoint(path: str | Path) -> FoundCheckpoint:
    """Find the checkpoint at ``path``: a work_dir, a tag folder, its parent, or a file.

    Files are opened only to tell missing files from leftover ones.

    Raises:
        CheckpointError: There is none, there are several, or files are missing.
    """
    given = Path(path).expanduser()
    if given.is_file():
        return _single_file(given, given)
    if not given.is_dir():
        raise CheckpointError(f'{given}: no such file or folder; give a checkpoint or the work_dir of a run')
    target = _follow(given)
    if target.is_file():
        return _single_file(given, target)
    names = sorted(entry.name for entry in target.iterdir())
    if any(_is_of_dcp(name) for name in names):
        return _dcp(given, target, names)
    return _find_parts(given, target)


def _single_file(given: Path, file: Path) -> FoundCheckpoint:
    if _is_part(file.name):
        raise CheckpointError(f'{file}: one part of a DeepSpeed checkpoint; give its folder {file.parent}')
    if _is_of_dcp(file.name):
        raise CheckpointError(f'{file}: one part of a checkpoint; give its folder {file.parent}')
    _refuse_unsupported(file)
    if file.suffix == '.safetensors':
        raise CheckpointError(f'{file}: already a safetensors file; give a checkpoint of torch.save or DeepSpeed')
    return FoundCheckpoint(given, file, 'file', (file,))


def _is_of_dcp(name: str) -> bool:
    return name == _DCP_INDEX or _DCP_FILE.fullmatch(name) is not None


def _follow(folder: Path) -> Path:
    """Resolve a given folder to the tag folder or file in it."""
    names = sorted(entry.name for entry in folder.iterdir())
    for name in names:
        _refuse_unsupported(folder / name)
    if any(_is_part(name) or _is_of_dcp(name) or _STRATEGY_FILE.fullmatch(name) for name in names) or _is_universal(
        folder
    ):
        return folder
    if folder.name == 'zero' and _is_universal(folder.parent):
        raise CheckpointError(f'{folder}: one part of a universal checkpoint of DeepSpeed; give {folder.parent}')
    if 'last_checkpoint' in names:
        return _last_checkpoint(folder)
    # Accelerate: one tag per model; with several models, `latest` belongs to the last one saved
    models = [name for name in names if name.startswith('pytorch_model') and (folder / name).is_dir()]
    if len(models) < 2:
        for pointer in ('latest', 'latest_universal'):
            if pointer in names:
                return _tag(folder, pointer, names)
        if models and _FSDP_FOLDER.fullmatch(models[0]):
            return folder / models[0]
        if _FSDP_WHOLE in names:
            return folder / _FSDP_WHOLE
    candidates = models or _candidates(names)
    if candidates:
        shown = ', '.join(candidates[-_SHOWN:])
        raise CheckpointError(f'{folder}: holds {len(candidates)} checkpoints ({shown}); give one of them')
    raise CheckpointError(
        f'{folder}: not a checkpoint: it has no *_model_states.pt, last_checkpoint or latest; give a checkpoint or '
        f'the work_dir of a run'
    )


def _tag(folder: Path, pointer: str, names: list[str]) -> Path:
    tag = _text(folder / pointer)
    if tag not in names or not (folder / tag).is_dir():
        raise CheckpointError(f'{folder / pointer}: names {tag[:80]!r}, but there is no such folder; give a tag folder')
    return folder / tag


def _candidates(names: list[str]) -> list[str]:
    """Checkpoints in the folder, oldest first."""
    numbered = [(int(match[1]), name) for name in names if (match := _NUMBERED.fullmatch(name))]
    return [name for _, name in sorted(numbered)]


def _last_checkpoint(folder: Path) -> Path:
    """The checkpoint that MMEngine recorded; the work_dir may have moved since."""
    text = _text(folder / 'last_checkpoint')
    for path in (folder / Path(text).name, Path(text)):
        if text and _exists(path):
            return path
    raise CheckpointError(
        f'{folder / "last_checkpoint"}: names {text[:200]!r}, which does not exist; give the checkpoint itself'
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # not a valid file name
        return False


def _text(path: Path) -> str:
    with path.open('rb') as file:
        return file.read(4096).decode(errors='replace').strip()


def _refuse_unsupported(path: Path) -> None:
    for pattern, what in _UNSUPPORTED:
        if pattern.fullmatch(path.name):
            raise CheckpointError(f'{path}: {what}')
    if path.parent.suffix == '.pth' and _STRATEGY_FILE.fullmatch(path.name):
        raise CheckpointError(
            f"{path}: one rank's part of MMEngine's FSDPStrategy, which is not supported; load it with its "
            f"load_checkpoint on the same number of ranks, and save it again with state_dict_cfg='full' or with "
            f'HFCheckpointHook'
        )


def _dcp(given: Path, folder: Path, names: list[str]) -> FoundCheckpoint:
    if _DCP_INDEX not in names:
        raise CheckpointError(
            f'{folder / _DCP_INDEX}: missing, but files of torch.distributed.checkpoint are there; copy it, too'
        )
    files = tuple(folder / name for name in names if _DCP_FILE.fullmatch(name))
    return FoundCheckpoint(given, folder, 'dcp', files)


def _is_part(name: str) -> bool:
    """Whether a file of this name belongs to a tag folder."""
    return _LIKE_THEM.fullmatch(name) is not None or any(pattern.fullmatch(name) for pattern, _ in _PARTS_UNSUPPORTED)


def _is_universal(folder: Path) -> bool:
    """Whether the folder was written by ``ds_to_universal.py``."""
    return next(folder.glob('zero/*/fp32.pt'), None) is not None


def _find_parts(given: Path, folder: Path) -> FoundCheckpoint:
    """Find the files of the checkpoint in a tag folder.

    Raises:
        CheckpointError: Files are missing, left over, or of an unsupported training mode.
    """
    whole, models, optims, prefixes = _sorted_out(folder)
    universal = not optims and _is_universal(folder)
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
        _refuse_unsupported(file)
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
