"""Modules around the exported model: in a SentenceTransformer the pooling, and modules with weights of their own.

Where the trained model has no ``save_pretrained`` for them, what is trained of them goes to exporters/other_modules.py.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xhf_hooks.exporters.base import unchanged_entries
from xhf_hooks.exporters.other_modules import (
    OTHER_FILES,
    is_of_other_modules,
    specs_of_other_modules,
    write_config_of_other_modules,
)
from xhf_hooks.format.index import WEIGHTS_NAME, WEIGHTS_SUFFIX
from xhf_hooks.format.safetensors import read_header
from xhf_hooks.format.text import error_text
from xhf_hooks.model import model_class, names_by_identity, without_wrappers
from xhf_hooks.planning.types import ExportEntry, FileSet, TensorSpec
from xhf_hooks.system.library_settings import quiet

#: How the names of files with weights end.
WEIGHTS = (WEIGHTS_SUFFIX, '.bin', '.pt', '.pth', '.index.json')
#: The number that stands in place of a tensor.
_NUMBER_DTYPE, _NUMBER_NBYTES = 'I64', 8


@dataclass(frozen=True)
class _Written:
    """The files that the trained model's own ``save_pretrained`` writes around the exported model.

    Attributes:
        files: Content by path, without those that have weights.
        tensors: By the path of a safetensors file, the tensor's number by its name in the file.
        unknown: Paths of other files with weights.
        error: Why ``save_pretrained`` could not be tried; None if it was.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    tensors: dict[str, dict[str, int]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    error: str | None = None


def entries_around(
    whole: nn.Module | None, path: str, specs: Sequence[TensorSpec], dtype: str | None, read: Collection[str]
) -> list[ExportEntry]:
    """The tensors outside of the exported model. Runs on: all ranks.

    They are in the files of ``whole.save_pretrained``. What is trained, and in none of them, is in
    :mod:`.other_modules`.

    Args:
        whole: The trained model, such as a SentenceTransformer; None if there is only the exported model.
        path: That of the exported model in it.
        dtype: As in ``Exporter.entries``.
        read: Names of the tensors that the exported model is made of.
    """
    if whole is None or all(spec.name.startswith(f'{path}.') for spec in specs):
        return []
    entries = []
    names = [(spec.name, *spec.aliases) for spec in specs]
    for file, numbers in _written_around(whole, path, names).tensors.items():
        folder, _, name = file.rpartition('/')
        files = FileSet(folder, name.removesuffix(WEIGHTS_SUFFIX), may_split=False)
        entries += unchanged_entries({name: specs[number] for name, number in numbers.items()}, dtype, files)
    written = {*read, *(name for entry in entries for name in entry.reads)}
    others = specs_of_other_modules(whole, [spec for spec in specs if spec.name not in written])
    return entries + unchanged_entries(others, dtype, OTHER_FILES)


def files_of(entries: Sequence[ExportEntry]) -> set[str]:
    """The paths of the files of :func:`entries_around`."""
    return {entry.file_set.path(entry.file_set.stem + WEIGHTS_SUFFIX) for entry in entries}


def write_what_surrounds(folder: Path, whole: nn.Module | None, path: str, planned: Collection[str]) -> list[str]:
    """Write what ``whole.save_pretrained`` writes around the exported model, and return warnings. Runs on: rank 0.

    Files that are there already stay.

    Args:
        whole: As in :func:`entries_around`.
        path: That of the exported model in it.
        planned: Files with weights that the save itself writes.
    """
    written = _Written() if whole is None else _written_around(whole, path, [n for _, n in names_by_identity(whole)])
    kind = type(whole).__name__
    for name in planned:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if is_of_other_modules(name):
            write_config_of_other_modules(folder, path)
    if written.error is not None:
        return [f'modules of {kind} outside of the exported model are not saved: its save_pretrained: {written.error}']
    for name, content in written.files.items():
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    weights = {*written.unknown, *written.tensors} - {*planned}
    lost = sorted(name for name in weights if not (folder / name).exists())
    if not lost:
        return []
    return [f'{lost} of {kind} are not saved: they hold weights outside of the exported model']


def read_files(folder: Path) -> dict[str, bytes]:
    """The content of all files in a folder, by path."""
    paths = sorted(path for path in folder.rglob('*') if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _written_around(whole: nn.Module, path: str, names: Sequence[Sequence[str]]) -> _Written:
    """Call ``save_pretrained`` of a copy that has numbers in place of tensors, and whose exported model saves nothing.

    Args:
        names: All names of each tensor. Its number is its place in this list.
    """
    if path == '' or not callable(getattr(whole, 'save_pretrained', None)) or _is_of_peft(whole):
        return _Written()
    try:
        numbers: dict[str, torch.Tensor] = {}
        for number, names_of_one in enumerate(names):
            numbers.update(dict.fromkeys(names_of_one, torch.tensor([number], device='cpu')))
        trial = _copied(whole, '', path, numbers)
        options: dict[str, Any] = {'create_model_card': False}  # sentence-transformers' would describe the whole run
        known = inspect.signature(trial.save_pretrained).parameters
        with quiet(), tempfile.TemporaryDirectory(prefix='xhf_hooks_') as temporary:
            trial.save_pretrained(temporary, **{name: value for name, value in options.items() if name in known})
            files = read_files(Path(temporary))
            stored = [name for name in files if name.endswith(WEIGHTS_SUFFIX)]
            found = {name: _numbers_in(Path(temporary, name), len(names)) for name in stored}
    except Exception as error:  # of any type, from the model's own code
        return _Written(error=error_text(error))
    # The exported model itself is in model.safetensors of the main folder
    tensors = {name: numbered for name, numbered in found.items() if numbered and name != WEIGHTS_NAME}
    unknown = [name for name in files if name.endswith(WEIGHTS) and name not in tensors]
    return _Written({n: data for n, data in files.items() if not n.endswith(WEIGHTS)}, tensors, unknown)


def _numbers_in(path: Path, n_numbers: int) -> dict[str, int]:
    """The numbers that a file has in place of tensors; {} if it has other tensors, such as computed ones."""
    content, numbers = path.read_bytes(), {}
    for entry in read_header(path).entries:
        number = int.from_bytes(content[entry.start : entry.end], 'little')
        if entry.dtype != _NUMBER_DTYPE or entry.end - entry.start != _NUMBER_NBYTES or number >= n_numbers:
            return {}
        numbers[entry.name] = number
    return numbers


def _is_of_peft(module: nn.Module) -> bool:
    return any(kind.__module__.startswith('peft.') for kind in type(module).__mro__)


def _copied(module: nn.Module, at: str, path: str, numbers: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of the modules, without wrappers, that has numbers in place of tensors.

    Args:
        at: The path of the module.
        path: That of the exported model, which is not copied, but for a part that saves nothing.
        numbers: By name.
    """
    while wrapped := next((one for name, one in module._modules.items() if without_wrappers(name) == ''), None):
        module = wrapped
    copy_of: nn.Module = object.__new__(model_class(module))  # copy.copy would call __init__ of an FSDP module
    vars(copy_of).update(vars(module))
    if at == path or _is_of_peft(module):
        copy_of.save_pretrained = lambda *arguments, **options: None
        return copy_of
    prefix = f'{at}.' if at else ''
    copy_of._modules = {
        name: None if one is None else _copied(one, f'{prefix}{name}', path, numbers)
        for name, one in module._modules.items()
    }
    for tensors in ('_parameters', '_buffers'):
        own = vars(module)[tensors]
        setattr(copy_of, tensors, {name: numbers.get(f'{prefix}{name}', one) for name, one in own.items()})
    for hooks in ('_state_dict_hooks', '_state_dict_pre_hooks'):  # of engines that would gather
        setattr(copy_of, hooks, {})
    return copy_of
