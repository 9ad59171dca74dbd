"""Finds the checkpoint at a path by file names."""

from __future__ import annotations

import re
from pathlib import Path

from xhf_hooks.errors import CheckpointError
from xhf_hooks.files.regular_files import open_regular
from xhf_hooks.sources.checkpoint.found import FoundCheckpoint
from xhf_hooks.sources.checkpoint.tag_folder import find_parts, is_part, is_universal, refuse_unsupported

_NUMBER = '(0|[1-9][0-9]{0,14})'
_NUMBERED = re.compile(rf'(?:iter_|epoch_|checkpoint-){_NUMBER}(?:\.pth)?')
#: Files of torch.distributed.checkpoint (``filesystem.py``), and one rank's file of MMEngine's FSDPStrategy.
_DCP_INDEX, _DCP_FILE = '.metadata', re.compile(r'[^/]+\.distcp')
_FSDP_RANK = re.compile(r'rank(0|[1-9][0-9]{0,6})\.pth')
#: Accelerate (``utils/fsdp_utils.py``, ``save_fsdp_model``): a folder, or one file with all weights.
_FSDP_FOLDER, _FSDP_WHOLE = re.compile(rf'pytorch_model_fsdp_{_NUMBER}'), 'pytorch_model_fsdp.bin'
_UNSUPPORTED = (
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
    if any(_FSDP_RANK.fullmatch(name) for name in names):
        return _fsdp(given, target, names)
    return find_parts(given, target)


def _single_file(given: Path, file: Path) -> FoundCheckpoint:
    if is_part(file.name):
        raise CheckpointError(f'{file}: one part of a DeepSpeed checkpoint; give its folder {file.parent}')
    if _is_of_dcp(file.name):
        raise CheckpointError(f'{file}: one part of a checkpoint; give its folder {file.parent}')
    if _FSDP_RANK.fullmatch(file.name) and file.parent.suffix == '.pth':
        raise CheckpointError(f"{file}: one part of a checkpoint of MMEngine's FSDPStrategy; give {file.parent}")
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
    if any(is_part(name) or _is_of_dcp(name) or _FSDP_RANK.fullmatch(name) for name in names) or is_universal(folder):
        return folder
    if folder.name == 'zero' and is_universal(folder.parent):
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
    with open_regular(path) as file:
        return file.read(4096).decode(errors='replace').strip()


def _refuse_unsupported(path: Path) -> None:
    refuse_unsupported(path)
    for pattern, what in _UNSUPPORTED:
        if pattern.fullmatch(path.name):
            raise CheckpointError(f'{path}: {what}')


def _dcp(given: Path, folder: Path, names: list[str]) -> FoundCheckpoint:
    if _DCP_INDEX not in names:
        raise CheckpointError(
            f'{folder / _DCP_INDEX}: missing, but files of torch.distributed.checkpoint are there; copy it, too'
        )
    files = tuple(folder / name for name in names if _DCP_FILE.fullmatch(name))
    return FoundCheckpoint(given, folder, 'dcp', files)


def _fsdp(given: Path, folder: Path, names: list[str]) -> FoundCheckpoint:
    files = {int(match[1]): folder / name for name in names if (match := _FSDP_RANK.fullmatch(name))}
    return FoundCheckpoint(given, folder, 'fsdp', tuple(files[rank] for rank in sorted(files)))
