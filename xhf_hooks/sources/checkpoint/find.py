"""Finds the checkpoint that a path means, by the names of its files alone.

The names are those of DeepSpeed ``runtime/engine.py`` (``_get_ckpt_name``, ``_get_rank_zero_ckpt_name``,
``_get_expert_ckpt_name``, ``_get_optimizer_ckpt_name``) and ``runtime/pipe/module.py`` (``ckpt_layer_path``).
"""

from __future__ import annotations

import re
from pathlib import Path

from xhf_hooks.errors import CheckpointError
from xhf_hooks.regular_files import open_regular
from xhf_hooks.sources.checkpoint.records import FoundCheckpoint

_MODEL = re.compile(r'(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt')
_OPTIM = re.compile(r'(?P<prefix>\w+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt')
_UNSUPPORTED = (
    (re.compile(r'layer_\d+_expert_\d+_.*|expp_rank_\d+_.*'), 'expert parallelism'),
    (re.compile(r'layer_\d+-.*model_states\.pt'), 'pipeline parallelism'),
    (re.compile(r'(?:zero_pp_rank_\d+_)?mp_rank_(?!00_)\d+_model_states\.pt'), 'tensor parallelism'),
    (re.compile(r'rank\d+\.pth'), "MMEngine's FSDPStrategy with local state dicts"),
    (re.compile(r'.*\.distcp'), 'torch.distributed.checkpoint'),
)
_SHOWN = 5


def find_checkpoint(path: str | Path) -> FoundCheckpoint:
    """The checkpoint at ``path``: a work folder, a tag folder, a folder around one, or a file.

    Raises:
        CheckpointError: There is none, or several; or a file is missing, as the numbers of the others tell.
    """
    given = Path(path).expanduser()
    if given.is_file():
        return _single_file(given, given)
    if not given.is_dir():
        raise CheckpointError(f'{given}: no such file or folder; give a checkpoint or the work folder of a run')
    target = _follow(given)
    if target.is_file():
        return _single_file(given, target)
    return _tag_folder(given, target)


def _single_file(given: Path, file: Path) -> FoundCheckpoint:
    if _MODEL.fullmatch(file.name) or _OPTIM.fullmatch(file.name):
        raise CheckpointError(f'{file}: one part of a DeepSpeed checkpoint; give its folder {file.parent}')
    if file.suffix == '.safetensors':
        raise CheckpointError(f'{file}: holds safetensors already; give a checkpoint of torch.save or DeepSpeed')
    return FoundCheckpoint(given, file, 'file', (file,))


def _follow(folder: Path) -> Path:
    """From the folder that was given to the tag folder or file in it."""
    names = sorted(entry.name for entry in folder.iterdir())
    if any(_MODEL.fullmatch(name) or _OPTIM.fullmatch(name) for name in names):
        return folder
    for name in names:
        _refuse_unsupported(folder / name)
    if 'last_checkpoint' in names:
        return _last_checkpoint(folder)
    # Accelerate's tags; with several models `latest` is that of the one that was saved last
    models = [name for name in names if name.startswith('pytorch_model') and (folder / name).is_dir()]
    if 'latest' in names and len(models) < 2:
        tag = _text(folder / 'latest')
        if tag not in names or not (folder / tag).is_dir():
            raise CheckpointError(f'{folder / "latest"}: names {tag[:80]!r}, no folder beside it; give a tag folder')
        return folder / tag
    candidates = models or _candidates(folder, names)
    if candidates:
        shown = ', '.join(candidates[-_SHOWN:])
        raise CheckpointError(f'{folder}: holds {len(candidates)} checkpoints ({shown}); give one of them')
    raise CheckpointError(
        f'{folder}: not a checkpoint: neither *_model_states.pt nor last_checkpoint nor latest is in it; '
        f'give a checkpoint or the work folder of a run'
    )


def _candidates(folder: Path, names: list[str]) -> list[str]:
    """What the user may have meant, oldest first."""
    numbered = [(int(m[1]), n) for n in names if (m := re.fullmatch(r'(?:iter_|epoch_|checkpoint-)(\d+)(?:\.pth)?', n))]
    return [name for _, name in sorted(numbered)]


def _last_checkpoint(folder: Path) -> Path:
    """MMEngine writes the path as it was then; the work folder may have moved since."""
    text = _text(folder / 'last_checkpoint')
    for path in (folder / Path(text).name, Path(text)):
        if text and _exists(path):
            return path
    raise CheckpointError(
        f'{folder / "last_checkpoint"}: names {text[:200]!r}, which is not there; give the checkpoint itself'
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that no file can have
        return False


def _text(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(4096).decode(errors='replace').strip()


def _refuse_unsupported(path: Path) -> None:
    for pattern, what in _UNSUPPORTED:
        if pattern.fullmatch(path.name):
            raise CheckpointError(
                f'{path}: a file of {what}, which is not supported; save without it, or export with HFCheckpointHook'
            )


def _tag_folder(given: Path, folder: Path) -> FoundCheckpoint:
    models: dict[str, Path] = {}
    optims: dict[str, Path] = {}
    prefixes: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        _refuse_unsupported(file)
        if match := _MODEL.fullmatch(file.name):
            models[match['rank'] or ''] = file
        elif match := _OPTIM.fullmatch(file.name):
            optims[match['rank']] = file
            prefixes[match['prefix'] or ''] = file
    if not models and not optims:
        raise CheckpointError(f'{folder}: not a checkpoint: holds no *_model_states.pt; give one that does')
    if '' in models and len(models) > 1:
        raise CheckpointError(f'{models[""]}: ZeRO-3 files lie beside it, left by another run; remove one or the other')
    if len(prefixes) > 1:
        one, other = list(prefixes.values())[:2]
        raise CheckpointError(f'{one}: {other.name} is of another precision; remove what another run has left')
    layout = _layout(folder)
    if '' in models:
        model_files = (models[''],)
    else:
        world_size = 1 + max(map(int, [*models, *optims]))
        model_files = _all_ranks(folder, models, world_size, 'zero_pp_rank_{}_mp_rank_00_model_states.pt')
        _all_ranks(folder, optims, world_size, '*zero_pp_rank_{}_mp_rank_00_optim_states.pt')
    n_optims = 1 + max(map(int, optims), default=-1)
    optim_files = _all_ranks(folder, optims, n_optims, '*zero_pp_rank_{}_mp_rank_00_optim_states.pt')
    return FoundCheckpoint(given, folder, layout, model_files, optim_files)


def _all_ranks(folder: Path, files: dict[str, Path], n_ranks: int, pattern: str) -> tuple[Path, ...]:
    by_rank = {int(rank): file for rank, file in files.items()}
    for rank in range(n_ranks):
        if rank not in by_rank:
            raise CheckpointError(
                f'{folder / pattern.format(rank)}: missing, though {n_ranks} ranks wrote; copy it, too'
            )
    return tuple(by_rank[rank] for rank in range(n_ranks))


def _layout(folder: Path) -> str:
    if folder.suffix == '.pth':
        return 'mmengine'
    if re.fullmatch(r'checkpoint-\d+', folder.absolute().parent.name):
        return 'trainer'
    return 'accelerate' if folder.name.startswith('pytorch_model') else 'deepspeed'
