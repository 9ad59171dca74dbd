"""Finds the checkpoint at a path by file names.

The names are those of DeepSpeed ``runtime/engine.py`` (``_get_ckpt_name``, ``_get_rank_zero_ckpt_name``,
``_get_expert_ckpt_name``, ``_get_optimizer_ckpt_name``), ``runtime/pipe/module.py`` (``ckpt_layer_path``) and
``checkpoint/ds_to_universal.py`` (``main``); torch.distributed.checkpoint ``filesystem.py``; Accelerate
``utils/fsdp_utils.py`` (``save_fsdp_model``: a folder, or one file with all weights); MMEngine ``_strategy/fsdp.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xhf_hooks.errors import CheckpointError

_NUMBERED = re.compile(r'(?:iter_|epoch_|checkpoint-)(\d{1,15})(?:\.pth)?', re.ASCII)
_DCP_INDEX = '.metadata'
_FSDP_FOLDER, _FSDP_WHOLE = re.compile(r'pytorch_model_fsdp_\d+'), 'pytorch_model_fsdp.bin'
_STRATEGY_FILE = re.compile(r'rank\d+\.pth')
_RANK = r'zero_pp_rank_(?P<rank>0|[1-9]\d{0,6})_'
_MODEL = re.compile(rf'(?:{_RANK})?mp_rank_00_model_states\.pt', re.ASCII)
_OPTIM = re.compile(rf'(?P<prefix>bf16_)?{_RANK}mp_rank_00_optim_states\.pt', re.ASCII)
_LIKE_THEM = re.compile(r'.*(?:model|optim)_states\.pt')
#: Of tensor, expert or pipeline parallelism.
_OTHER_PARALLELISM = re.compile(r'layer_\d+[-_].*\.pt|expp_rank_\d+_.*|.*mp_rank_(?!00_)\d{2,4}_.*_states\.pt')
_UNSUPPORTED = (
    (
        _OTHER_PARALLELISM,
        'of a run with tensor, pipeline or expert parallelism',
        "load it with DeepSpeed's load_checkpoint in the same kind of run and save the weights from there",
    ),
    (
        re.compile(r'pytorch_model_fsdp_(?:\d+_)?rank\d+\.bin'),
        "one rank's part of an FSDP model",
        "load it with Accelerate's load_state and save it again with SHARDED_STATE_DICT or FULL_STATE_DICT",
    ),
    (
        re.compile(r'__\d+\.metadata'),
        "one rank's index of torch.distributed.checkpoint",
        'load it with torch.distributed.checkpoint and save it again with use_collectives=True',
    ),
)
_SHOWN = 5


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
    if any(map(_is_of_dcp, names)):
        return _dcp(given, target, names)
    return _find_parts(given, target)


def _single_file(given: Path, file: Path) -> FoundCheckpoint:
    if _LIKE_THEM.fullmatch(file.name) or _is_of_dcp(file.name):
        raise CheckpointError(f'{file}: one part of a checkpoint; give its folder {file.parent}')
    _refuse_unsupported(file)
    if file.suffix == '.safetensors':
        raise CheckpointError(f'{file}: already a safetensors file; give a checkpoint of torch.save or DeepSpeed')
    return FoundCheckpoint(given, file, 'file', (file,))


def _is_of_dcp(name: str) -> bool:
    return name == _DCP_INDEX or name.endswith('.distcp')


def _follow(folder: Path) -> Path:
    """Resolve a given folder to the tag folder or file in it."""
    names = sorted(entry.name for entry in folder.iterdir())
    for name in names:
        _refuse_unsupported(folder / name)
    if any(_LIKE_THEM.fullmatch(name) or _is_of_dcp(name) for name in names) or _is_universal(folder):
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
    numbered = sorted((int(match[1]), name) for name in names if (match := _NUMBERED.fullmatch(name)))
    candidates = models or [name for _, name in numbered]
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


def _last_checkpoint(folder: Path) -> Path:
    """The checkpoint that MMEngine recorded; the work_dir may have moved since."""
    text = _text(folder / 'last_checkpoint')
    for path in (folder / Path(text).name, Path(text)):
        if text and os.path.exists(path):  # unlike Path.exists, false for what cannot be a name
            return path
    raise CheckpointError(
        f'{folder / "last_checkpoint"}: names {text[:200]!r}, which does not exist; give the checkpoint itself'
    )


def _text(path: Path) -> str:
    with path.open('rb') as file:
        return file.read(4096).decode(errors='replace').strip()


def _refuse_unsupported(path: Path) -> None:
    for pattern, what, remedy in _UNSUPPORTED:
        if pattern.fullmatch(path.name):
            raise CheckpointError(f'{path}: {what}, which is not supported; {remedy}')
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
    files = tuple(folder / name for name in names if name.endswith('.distcp'))
    return FoundCheckpoint(given, folder, 'dcp', files)


def _is_universal(folder: Path) -> bool:
    """Whether the folder was written by ``ds_to_universal.py``."""
    return next(folder.glob('zero/*/fp32.pt'), None) is not None


def _find_parts(given: Path, folder: Path) -> FoundCheckpoint:
    """The files of the checkpoint in a tag folder, in the order of ranks.

    Raises:
        CheckpointError: There are none, or some are of another run or of an unsupported training mode.
    """
    models: dict[int, Path] = {}
    optims: dict[int, Path] = {}
    kinds: dict[tuple[bool, str | bool | None], Path] = {}  # one for model files, and one for optimizer files
    for file in sorted(folder.iterdir()):
        _refuse_unsupported(file)
        model, optim = _MODEL.fullmatch(file.name), _OPTIM.fullmatch(file.name)
        if model:
            models[int(model['rank'] or 0)] = kinds[True, model['rank'] is None] = file
        elif optim:
            optims[int(optim['rank'])] = kinds[False, optim['prefix']] = file
        elif _LIKE_THEM.fullmatch(file.name):
            raise CheckpointError(f'{file}: not a file name of DeepSpeed; remove it, or restore its name')
    if not models:
        raise CheckpointError(
            f'{folder}: *_model_states.pt is missing; copy it, too, or, if ds_to_universal.py did not finish, run it '
            f'again'
        )
    if len(kinds) > 1 + bool(optims):
        shown = ', '.join(file.name for file in kinds.values())
        raise CheckpointError(f'{folder}: holds files of several runs ({shown}); remove those of all but one')
    model_files = tuple(models[rank] for rank in sorted(models))
    if not optims and _is_universal(folder):
        return FoundCheckpoint(given, folder, 'universal', model_files, parameter_files=_parameter_files(folder))
    return FoundCheckpoint(given, folder, _layout(folder), model_files, tuple(optims[rank] for rank in sorted(optims)))


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
