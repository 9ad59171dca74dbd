"""Modules around the exported model: in a SentenceTransformer the pooling, and modules with weights of their own.

Where the trained model has no ``save_pretrained`` for them, what is trained of them goes to exporters/other_modules.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from xhf_hooks.exporters.ask_save import ModelTensor, SaveAnswer, ask_save_around
from xhf_hooks.exporters.base import ExportRequest, names_read_by, unchanged_entries
from xhf_hooks.exporters.find_model import adapters_in
from xhf_hooks.exporters.other_modules import (
    OTHER_FILES,
    is_of_other_modules,
    specs_of_other_modules,
    write_config_of_other_modules,
)
from xhf_hooks.exporters.traced import traced
from xhf_hooks.exporters.traced_entries import entries_of
from xhf_hooks.format.dtypes import TORCH_DTYPES, cast_float
from xhf_hooks.format.index import WEIGHTS_NAME
from xhf_hooks.format.text import error_text
from xhf_hooks.planning.types import ExportEntry
from xhf_hooks.system.files import write_missing


@dataclass(frozen=True)
class Surroundings:
    """What is saved of the modules around the exported model.

    Attributes:
        entries: Their tensors.
        answer: What ``save_pretrained`` of the trained model writes around the exported model.
        warnings: For the log.
    """

    entries: tuple[ExportEntry, ...] = ()
    answer: SaveAnswer = field(default_factory=SaveAnswer)
    warnings: tuple[str, ...] = ()

    @property
    def weight_files(self) -> set[str]:
        """The paths of the files with their tensors."""
        return {entry.file_set.whole_file for entry in self.entries}

    def write(self, folder: Path, path: str) -> list[str]:
        """Write the files without weights, and return warnings. Runs on: rank 0.

        Files that are there already stay.

        Args:
            path: That of the exported model in the trained model.
        """
        for name in self.weight_files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if is_of_other_modules(name):
                write_config_of_other_modules(folder, path)
        write_missing(folder, self.answer.files)
        lost = [name for name in self.answer.not_saved if not (folder / name).exists()]
        return warn_of_not_saved(lost)


def warn_of_not_saved(files: Collection[str]) -> list[str]:
    """A warning about files that ``save_pretrained`` of a class writes, and a save cannot."""
    if not files:
        return []
    return [
        f"{sorted(files)} are not saved: the model's own save_pretrained puts values of tensors into them, and a save "
        f'writes only tensors that go to save_file of safetensors'
    ]


def ask_surroundings(request: ExportRequest, path: str, read: Collection[str]) -> Surroundings:
    """What is saved around the exported model. Runs on: all ranks.

    That is what ``whole.save_pretrained`` writes. Trained tensors in none of its files are left to
    :mod:`.other_modules`.

    Args:
        path: The path of the exported model in the trained one.
        read: Names of the tensors that the exported model is made of.
    """
    whole, specs = request.whole, request.specs
    if whole is None or path == '':
        return Surroundings()
    tensors, own = {}, {}
    for spec in specs:
        source = traced(spec.name, spec.shape, TORCH_DTYPES[spec.dtype])
        written = ModelTensor(spec.shape, TORCH_DTYPES[cast_float(spec.dtype, request.dtype)], spec.name)
        for name in (spec.name, *spec.aliases):
            tensors[name], own[name] = written, source
    answer, warnings = _ask(whole, path, tensors)
    entries = entries_of(answer.weights, own)
    written_names = {*read, *names_read_by(entries)}
    others = specs_of_other_modules(whole, [spec for spec in specs if spec.name not in written_names])
    return Surroundings((*entries, *unchanged_entries(others, request.dtype, OTHER_FILES)), answer, warnings)


def _ask(whole: nn.Module, path: str, tensors: Mapping[str, ModelTensor]) -> tuple[SaveAnswer, tuple[str, ...]]:
    if not callable(getattr(whole, 'save_pretrained', None)) or _is_of_peft(whole):
        return SaveAnswer(), ()
    try:
        answer = ask_save_around(whole, tensors, {path, *adapters_in(whole)})
    except Exception as error:  # of any type, from the model's own code
        problem = f'its save_pretrained: {error_text(error)}'
        warning = f'modules of {type(whole).__name__} outside of the exported model are not saved: {problem}'
        return SaveAnswer(), (warning,)
    # The exported model itself is in model.safetensors of the main folder
    weights = dict(answer.weights)
    lost = () if weights.pop(WEIGHTS_NAME, None) is None else (WEIGHTS_NAME,)
    return SaveAnswer(weights, answer.files, (*answer.not_saved, *lost)), ()


def _is_of_peft(module: nn.Module) -> bool:
    return any(kind.__module__.startswith('peft.') for kind in type(module).__mro__)
