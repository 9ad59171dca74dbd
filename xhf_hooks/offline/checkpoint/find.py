"""Finds the checkpoint at a path by file names.

The names are those of DeepSpeed ``runtime/engine.py`` (``_get_ckpt_name``, ``_get_rank_zero_ckpt_name``,
``_get_expert_ckpt_name``, ``_get_optimizer_ckpt_name``), ``runtime/pipe/module.py`` (``ckpt_layer_path``) and
``checkpoint/ds_to_universal.py`` (``main``, refused); torch.distributed.checkpoint ``filesystem.py``; Accelerate
``utils/fsdp_utils.py`` (``save_fsdp_model``: a folder, or one file with all weights); MMEngine ``_strategy/fsdp.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.errors import CheckpointError, XhfError
from xhf_hooks.format.index import ADAPTER_WEIGHTS_NAME, HF_WEIGHTS, WEIGHTS_SUFFIX, weight_files
from xhf_hooks.format.loaded_files import ADAPTER_CONFIG, CONFIG
from xhf_hooks.format.text import some
from xhf_hooks.system.files import absolute

_NUMBERED = re.compile(r'(iter_|epoch_|checkpoint-)\d+(\.pth)?')
_DCP_INDEX = '.metadata'
_FSDP_NAME = re.compile(r'pytorch_model_fsdp(_\d+|\.bin)')
#: The file of a rank: with model weights (of rank 0 alone at stages 0 to 2), or of the optimizer. With Ulysses,
#: DeepSpeed before 0.19 names those of other sequence ranks as if tensors were split (mp_rank_01); each has its rank.
_PART = re.compile(
    r'(bf16_)?(?:zero_pp_rank_(?P<rank>0|[1-9]\d{0,6})_)?mp_rank_\d\d_(?P<kind>model|optim)_states\.pt', re.ASCII
)
_LIKE_PARTS = re.compile(r'.*(?:model|optim)_states\.pt')
#: Of pipeline, expert or tensor parallelism (Megatron and nanotron, too); one rank's part of Accelerate's FSDP, of
#: verl's, and of torch.distributed.checkpoint without ``use_collectives``.
_UNSUPPORTED = re.compile(
    r'layer_\d+[-_].*\.pt|expp_rank_\d+_.*|(?!(bf16_)?zero_pp_rank_[1-9]).*mp_rank_(?!00_)\d{2,4}_.*_states\.pt'
    r'|pytorch_model_fsdp_(?:\d+_)?rank\d+\.bin|__\d+\.metadata|model_world_size_\d+_rank_\d+\.pt'
    r'|model_optim_rng\.pt|model_\w+_pp-rank-\d+.*\.safetensors'
)
#: One rank's part of a model, of torch's HuggingFaceStorageWriter with ``save_distributed`` (``_hf_utils.py``).
_UNCONSOLIDATED = re.compile(r'shard-\d+-model-\d+-of-\d+\.safetensors', re.ASCII)
#: One of several files with the weights of a model, as ``save_pretrained`` and ``zero_to_fp32`` write them.
_SHARD = re.compile(r'(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.bin|\.safetensors)', re.ASCII)
_WEIGHT_SUFFIXES = ('.pth', '.pt', '.bin', '.ckpt', WEIGHTS_SUFFIX)
#: What Trainer and Accelerate write beside weights: optimizers, schedulers, random states, data loaders, arguments.
#: And of verl and torchtune: the state of data, and of the recipe.
_NO_WEIGHTS = re.compile(
    r'(optimizer|scheduler|scaler|sampler|dl_state|training_args|rng_state|random_states|recipe_state).*|data\.pt'
)
#: How far below a folder without a checkpoint one is looked for, to name it.
_MAX_DEPTH = 3
_READY = 'a Hugging Face folder already, ready to load; xhf-verify checks it'
#: Files of MMEngine and of DeepSpeed that name a checkpoint.
_POINTERS = ('last_checkpoint', 'latest', 'latest_universal')
_ADAPTER = 'an adapter already, which peft loads; save_pretrained of the loaded one writes safetensors'
_STRATEGY_FILE = re.compile(r'rank\d+\.pth')


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint recognised by its file names.

    Attributes:
        path: The checkpoint: DeepSpeed's tag folder, or one file. It is absolute.
        layout: ``'mmengine'`` (a tag folder ``iter_N.pth`` or ``epoch_N.pth``), ``'deepspeed'`` (``latest`` or a
            tag folder of another name), ``'trainer'`` (``checkpoint-N``, transformers or Axolotl),
            ``'accelerate'`` (``pytorch_model``), ``'dcp'`` (torch.distributed.checkpoint), or ``'file'`` (all weights
            in one ``.pth`` or in the ``.bin`` or safetensors files of one model).
        model_files: ``*_model_states.pt`` in rank order (one at stages 0 to 2), the ``.distcp`` files sorted by name,
            or the one file, or all files of a model that is in several.
        optim_files: ``*_optim_states.pt`` in rank order; DeepSpeed's layouts only.
    """

    path: Path
    layout: str
    model_files: tuple[Path, ...]
    optim_files: tuple[Path, ...] = ()

    @property
    def nbytes(self) -> int:
        """Total size of these files."""
        return sum(file.stat().st_size for file in (*self.model_files, *self.optim_files))

    @property
    def run_folders(self) -> tuple[Path, ...]:
        """Folders whose Hugging Face files are those of this run, the nearest first.

        MMEngine's checkpoints lie in the work_dir, and those of ``save_checkpoint(DIR)`` in DIR: what lies higher is of
        other runs and models. Trainer and scripts with Accelerate also write into the folder above ``checkpoint-500``
        or the folder of ``save_state``.
        """
        own = () if self.layout == 'file' else (self.path,)
        folder = self.path.parent
        is_state = _FSDP_NAME.fullmatch(self.path.name) or any(folder.glob('random_states_*.pkl'))
        above = (folder.parent,) if is_state or self.layout in ('trainer', 'accelerate') else ()
        return (*own, folder, *above)


def find_checkpoint(path: str | Path) -> FoundCheckpoint:
    """Find the checkpoint at ``path``: a work_dir, a tag folder, its parent, or a file.

    Raises:
        CheckpointError: There is none, there are several, or files are missing.
    """
    try:
        given = absolute(Path(path).expanduser())
    except RuntimeError:  # ~name of a user who is not known here
        raise CheckpointError(f'{path}: no such home folder; give a checkpoint or the work_dir of a run') from None
    if not given.exists():
        what = (
            f'a link to {os.readlink(given)}, which does not exist' if given.is_symlink() else 'no such file or folder'
        )
        raise CheckpointError(f'{given}: {what}; give a checkpoint or the work_dir of a run')
    target = _follow(given) if given.is_dir() else given
    if target.is_dir():
        return _dcp(target) if any(map(_is_of_dcp, _names_in(target))) else _find_parts(target)
    _refuse_unsupported(target)
    if _LIKE_PARTS.fullmatch(target.name) or _is_of_dcp(target.name):
        raise CheckpointError(f'{target}: one part of a checkpoint; give its folder {target.parent}')
    if HF_WEIGHTS.fullmatch(target.name) and target.suffix == WEIGHTS_SUFFIX and _is_ready(target.parent):
        raise CheckpointError(f'{target.parent}: {_READY}')
    if target.name == 'adapter_model.bin':
        raise CheckpointError(f'{target.parent}: {_ADAPTER}')
    files = _with_siblings(target)
    return FoundCheckpoint(files[0], 'file', files)


def _with_siblings(file: Path) -> tuple[Path, ...]:
    """The file, or all files of the model of which it has a part.

    Raises:
        CheckpointError: One of them is missing.
    """
    shard = _SHARD.fullmatch(file.name)
    if shard is None:
        return (file,)
    total = shard['total']
    names = [f'{shard["stem"]}-{number:05d}-of-{total}{shard["suffix"]}' for number in range(1, int(total) + 1)]
    missing = [name for name in names if not (file.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f'{file}: one of {int(total)} files of a model, and {some(missing)} missing; copy them, too'
        )
    return tuple(file.parent / name for name in names)


def _is_of_dcp(name: str) -> bool:
    return name == _DCP_INDEX or name.endswith('.distcp')


def _names_in(folder: Path) -> list[str]:
    """The content of a folder, sorted; without the files that macOS puts beside each file on other disks."""
    return sorted(name for name in os.listdir(folder) if not name.startswith('._'))


def _follow(folder: Path) -> Path:
    """Resolve a given folder to the tag folder or file in it."""
    names = _names_in(folder)
    for name in names:
        _refuse_unsupported(folder / name)
    if any(_LIKE_PARTS.fullmatch(name) or _is_of_dcp(name) for name in names):
        return folder
    # Accelerate: one tag per model; with several models, `latest` belongs to the last one saved
    models = [name for name in names if name.startswith('pytorch_model') and (folder / name).is_dir()]
    if len(models) < 2:
        for pointer in _POINTERS:
            if pointer in names:
                return _named_by(folder / pointer)
        found = next(filter(_FSDP_NAME.fullmatch, [*models, *names]), None)
        if found is not None:
            return folder / found
    return _only_checkpoint(folder, names, models)


def _only_checkpoint(folder: Path, names: Sequence[str], models: Sequence[str]) -> Path:
    """The one checkpoint in a folder where no file names it.

    Args:
        names: The content of the folder.
        models: Folders in it that Accelerate wrote, each with a model.

    Raises:
        CheckpointError: There is none, or there are several.
    """
    hf_weights = [name for name in names if HF_WEIGHTS.fullmatch(name)]
    candidates = models or [name for name in names if name not in hf_weights and _is_candidate(folder / name)]
    is_run = any(_NUMBERED.fullmatch(name) or (folder / name).is_dir() for name in candidates)
    if not is_run and _is_ready(folder):
        raise CheckpointError(f'{folder}: {_READY}')
    if any(map(_NUMBERED.fullmatch, candidates)):  # beside the model that Trainer saves at the end
        candidates = [*candidates, *hf_weights]
    elif not is_run:
        candidates = [*candidates, *(name for name in hf_weights if not name.startswith('adapter_model'))]
    candidates = _without_repetitions(folder, candidates)
    newest_first = sorted(candidates, key=lambda name: (name not in hf_weights, len(name), name), reverse=True)
    if len(candidates) > 1:
        raise CheckpointError(f'{folder}: holds several checkpoints ({some(newest_first)}); give one of them')
    if candidates:
        only = folder / candidates[0]
        return _follow(only) if only.is_dir() else only
    if 'adapter_model.bin' in names:
        raise CheckpointError(f'{folder}: {_ADAPTER}')
    advice = f'it holds {some(names, 5)}' if names else 'it is empty'
    advice += '. Give a checkpoint or the work_dir of a run'
    if below := [str(path.relative_to(folder)) for path in _checkpoints_below(folder, _MAX_DEPTH)]:
        advice = f'give a folder below it: {some(below, 5)}'
    raise CheckpointError(
        f'{folder}: not a checkpoint: it has no *_model_states.pt, last_checkpoint or latest, and no file of weights; '
        f'{advice}'
    )


def _is_ready(folder: Path) -> bool:
    """Whether a folder has a config and all weights, under the names with which transformers or peft loads them."""
    if (folder / ADAPTER_CONFIG).is_file() and (folder / ADAPTER_WEIGHTS_NAME).is_file():
        return True
    with suppress(XhfError):
        files = weight_files(folder)
        return (folder / CONFIG).is_file() and bool(files) and all(file.is_file() for file in files)
    return False


def _without_repetitions(folder: Path, names: Sequence[str]) -> list[str]:
    """The names without links to others of them, and one name for all files of a model."""
    found: dict[object, str] = {}
    for name in sorted(names, key=lambda name: ((folder / name).is_symlink(), name)):
        part = _SHARD.fullmatch(name)
        key = part.group('stem', 'total', 'suffix') if part else os.path.realpath(folder / name)
        found.setdefault(key, name)
    return list(found.values())


def _checkpoints_below(folder: Path, depth: int) -> Iterator[Path]:
    """Folders below a folder that may be converted, or are ready to load.

    Raises:
        CheckpointError: One of them is of an unsupported kind.
    """
    for path in sorted(folder.iterdir()) if depth else ():
        with suppress(OSError):  # a folder of somebody else, which cannot be read
            if not path.is_dir():
                continue
            names = _names_in(path)
            for name in names:
                _refuse_unsupported(path / name)
            is_engine = any(_LIKE_PARTS.fullmatch(name) or _is_of_dcp(name) or name in _POINTERS for name in names)
            if is_engine or any((path / name).is_file() and _is_weights(name) for name in names):
                yield path
            else:
                yield from _checkpoints_below(path, depth - 1)


def _is_weights(name: str) -> bool:
    return Path(name).suffix in _WEIGHT_SUFFIXES and not _NO_WEIGHTS.fullmatch(name)


def _is_candidate(path: Path) -> bool:
    """Whether this may be a checkpoint: a folder of an engine, or a file whose name does not say something else."""
    if _NUMBERED.fullmatch(path.name):
        return True
    with suppress(OSError):  # a folder of somebody else, which cannot be read
        if path.is_dir():
            return any(_LIKE_PARTS.fullmatch(name) or _is_of_dcp(name) for name in _names_in(path))
    return _is_weights(path.name)


def _named_by(pointer: Path) -> Path:
    """The checkpoint in a file of MMEngine (its path, from which it may have moved) or of DeepSpeed (its tag)."""
    with pointer.open('rb') as file:
        text = file.read(4096).decode(errors='replace').strip()
    for path in (pointer.parent / Path(text).name, *([Path(text)] if '/' in text else [])):
        if text and os.path.exists(path):  # unlike Path.exists, false for what cannot be a name
            return path
    raise CheckpointError(f'{pointer}: names {text[:200]!r}, which does not exist; give the checkpoint itself')


def _refuse_unsupported(path: Path) -> None:
    of_strategy = path.parent.suffix == '.pth' and _STRATEGY_FILE.fullmatch(path.name)
    if of_strategy or _UNSUPPORTED.fullmatch(path.name):
        raise CheckpointError(
            f'{path}: of a run with tensor, pipeline or expert parallelism, or one part of an FSDP model, which is not '
            f'supported; load it as it was saved (DeepSpeed: load_checkpoint; Accelerate: load_state) and save whole '
            f"weights (Accelerate: FULL_STATE_DICT; MMEngine: state_dict_cfg='full'; verl, Megatron and nanotron have "
            f'tools for that), or use HFCheckpointHook there'
        )
    if _UNCONSOLIDATED.fullmatch(path.name):
        raise CheckpointError(
            f"{path}: one rank's part of what torch's HuggingFaceStorageWriter saved; put the parts together with "
            f'consolidate_safetensors_files of torch.distributed.checkpoint._consolidate_hf_safetensors, or save with '
            f'enable_consolidation=True'
        )
    if path.name == 'zero' and next(path.glob('*/fp32.pt'), None) is not None:
        raise CheckpointError(
            f'{path.parent}: a universal checkpoint (ds_to_universal.py), which is not supported; give the checkpoint '
            f'that it was made from'
        )


def _dcp(folder: Path) -> FoundCheckpoint:
    if not (folder / _DCP_INDEX).is_file():
        raise CheckpointError(
            f'{folder / _DCP_INDEX}: missing, but files of torch.distributed.checkpoint are there; copy it, too'
        )
    return FoundCheckpoint(folder, 'dcp', tuple(sorted(folder.glob('*.distcp'))))


def _find_parts(folder: Path) -> FoundCheckpoint:
    """The files of the checkpoint in a tag folder, in the order of ranks.

    Raises:
        CheckpointError: There are none, or some are of another run or of an unsupported training mode.
    """
    found: dict[str, dict[int, Path]] = {'model': {}, 'optim': {}}
    for file in (folder / name for name in _names_in(folder)):
        _refuse_unsupported(file)
        part = _PART.fullmatch(file.name)
        if part is not None:
            other = found[part['kind']].setdefault(int(part['rank'] or 0), file)
            if other != file:
                raise CheckpointError(
                    f'{folder}: holds files of several runs ({other.name}, {file.name}); remove those of all but one'
                )
        elif _LIKE_PARTS.fullmatch(file.name):
            raise CheckpointError(f'{file}: not a file name of DeepSpeed; remove it, or restore its name')
    models, optims = (tuple(file for _, file in sorted(files.items())) for files in found.values())
    if not models:
        raise CheckpointError(f'{folder}: *_model_states.pt is missing; copy it, too')
    return FoundCheckpoint(folder, _layout(folder), models, optims)


def _layout(folder: Path) -> str:
    if folder.suffix == '.pth':
        return 'mmengine'
    if re.fullmatch(r'checkpoint-[0-9]+', folder.parent.name):
        return 'trainer'
    return 'accelerate' if folder.name.startswith('pytorch_model') else 'deepspeed'
