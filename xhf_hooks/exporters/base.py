"""The interface of exporters, and exporters with several parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from xhf_hooks.exporters.assets.base_files import (
    LocatedBase,
    base_of_model,
    is_remote_code,
    warn_of_revisions,
)
from xhf_hooks.exporters.assets.load_tokenizer import CopiedFiles, load_or_copy_tokenizer
from xhf_hooks.format.dtypes import cast_float
from xhf_hooks.model import token_embeddings
from xhf_hooks.planning.types import ExportEntry, FileSet, Placement, TensorSpec

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ExportRequest:
    """What an exporter is asked for.

    Attributes:
        specs: All tensors of the trained model, which a source reads: from the live model, or from a checkpoint.
        dtype: Safetensors dtype to cast floats to, except those that the class keeps in fp32; AS_IN_BASE: each as in
            the base model's files; None keeps the training dtype.
        carry_base: The option: 'all' also copies tensors of the base in modules that the trained class does not have.
        run_config: The config of the run; empty without one.
        whole: The trained model, if what surrounds the exported one is saved, too, as in a SentenceTransformer
            (exporters/surroundings.py); None: only the exported model is, as for parts of a composite.
    """

    specs: Sequence[TensorSpec]
    dtype: str | None = None
    carry_base: str | None = None
    run_config: Mapping[str, Any] = field(default_factory=dict)
    whole: nn.Module | None = None


@dataclass(frozen=True, kw_only=True)
class Export:
    """What an exporter writes: the same for all saves until :meth:`Exporter.is_outdated`.

    Attributes:
        entries: The tensors to write, in the order of ``save_pretrained``.
        adapter_base_tensors: The tensors of a model whose adapter is written alone. That the base is left out goes
            without saying, unless training changes it.
        combine_nbytes: Largest allocation of one call of an entry's ``combine``, in bytes.
        n_parameters: ``total_parameters`` for the index file, by folder if there are several; None omits the field.
        warnings: What whoever loads the folder has to know, as far as it is known before a save. Each save has them
            among its own, and they are logged once.
    """

    entries: tuple[ExportEntry, ...]
    adapter_base_tensors: frozenset[str] = frozenset()
    combine_nbytes: int = 0
    n_parameters: int | Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()


ExportType = TypeVar('ExportType', bound=Export)


class Exporter(ABC, Generic[ExportType]):
    """Decides for one kind of model which tensors are written, under which names, and with which HF assets.

    It keeps nothing of what it is asked: :meth:`export` returns a value, which the other methods take. Only ``combine``
    functions of entries see tensors; everything else works on specs.

    Attributes:
        writes_whole_model: Whether it writes a model of transformers that loads without its base, perhaps among other
            parts.
        notes: Messages for the log.
        options: Names of additional options; the constructor takes them as keyword arguments.
    """

    options: tuple[str, ...] = ()
    _model: Any = None  # the transformers model whose base has the tokenizer and other files
    writes_whole_model: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        """Whether this exporter can export the model. Registered exporters override it."""
        return False

    @abstractmethod
    def export(self, request: ExportRequest) -> ExportType:
        """Decide what is written. Runs on: all ranks, with the same result.

        Raises:
            ModelError: The model differs from what ``from_pretrained`` will build.
        """

    def check_loading(self, export: ExportType, placements: Sequence[Placement]) -> list[str]:
        """Load what will be written, without weights, and return notes on what could not be checked. Runs on: rank 0.

        Called before anything is written.

        Raises:
            ModelError: It would not load, or as another model.
        """
        return []

    def is_outdated(self, export: ExportType) -> bool:
        """Whether what it was made from has changed, such as the model's config: then saves are planned again."""
        return False

    @abstractmethod
    def write_hf_assets(
        self, export: ExportType, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]
    ) -> list[str]:
        """Write all files except the weights, and create the entries' folders. Runs on: rank 0.

        Args:
            eos_token_ids: Token ids to add to the model's own.

        Returns:
            Warnings besides those of the export, such as of the tokenizer.
        """

    @property
    def base_model(self) -> LocatedBase:
        """The base that the model was loaded from."""
        return LocatedBase() if self._model is None else base_of_model(self._model)

    def warn_of_revisions(self) -> list[str]:
        """A warning if it is unknown which revision of the base the model was loaded from. Runs on: rank 0."""
        return [] if self._model is None else warn_of_revisions(self._model)

    @property
    def trusts_code(self) -> bool:
        """Whether training ran the code of the base model."""
        return self._model is not None and is_remote_code(self._model)

    @property
    def has_vocabulary(self) -> bool:
        """Whether the model reads or writes tokens, so that nobody can use it without a tokenizer."""
        writes = any(hasattr(self._model, head) for head in ('lm_head', 'ctc_head'))  # Wav2Vec2 and its kin only write
        return self._model is None or writes or bool(token_embeddings(self._model))

    def base_tokenizer(self) -> Any | None:
        """The base model's tokenizer, not loaded if it has code that is not trusted; None if it has none.

        Runs on: rank 0.
        """
        return load_or_copy_tokenizer(self.base_model, trust_remote_code=self.trusts_code)

    @property
    def n_base_tokens(self) -> int:
        """The number of tokens of :meth:`base_tokenizer`; 0 if there is none, or it is not loaded. Runs on: rank 0."""
        base = self.base_model
        if base.n_tokens is None:
            tokenizer = self.base_tokenizer()
            base.n_tokens = 0 if tokenizer is None or isinstance(tokenizer, CopiedFiles) else len(tokenizer)
        return base.n_tokens


@dataclass(frozen=True, kw_only=True)
class CompositeExport(Export):
    """An export with several parts.

    Attributes:
        parts: By folder, as in :class:`CompositeExporter`.
    """

    parts: Mapping[str, Export]


class CompositeExporter(Exporter[CompositeExport]):
    """Base class of exporters with several parts, which the constructor sets.

    Attributes:
        parts: Exporters by folder, relative to the checkpoint (``''`` is the checkpoint itself).
        tokenizer_folder: Folder of the part that gets the tokenizer; None if no part gets it.
        folder_around: Folder of the part that is written with what surrounds it; None if none is.
    """

    parts: dict[str, Exporter[Any]]
    tokenizer_folder: str | None = ''
    folder_around: str | None = None

    def export(self, request: ExportRequest) -> CompositeExport:
        entries, parts = [], {}
        for folder, part in self.parts.items():
            whole = request.whole if folder == self.folder_around else None
            parts[folder] = part.export(replace(request, whole=whole))
            for entry in parts[folder].entries:
                inside = '/'.join(filter(None, (folder, entry.file_set.folder)))
                entries.append(replace(entry, file_set=replace(entry.file_set, folder=inside)))
        return CompositeExport(
            entries=tuple(entries),
            adapter_base_tensors=frozenset().union(*(part.adapter_base_tensors for part in parts.values())),
            combine_nbytes=max(part.combine_nbytes for part in parts.values()),
            n_parameters={folder: part.n_parameters for folder, part in parts.items()},
            warnings=tuple(warning for part in parts.values() for warning in part.warnings),
            parts=parts,
        )

    @property
    def writes_whole_model(self) -> bool:  # type: ignore[override]
        return any(part.writes_whole_model for part in self.parts.values())

    def is_outdated(self, export: CompositeExport) -> bool:
        return any(part.is_outdated(export.parts[folder]) for folder, part in self.parts.items())

    def check_loading(self, export: CompositeExport, placements: Sequence[Placement]) -> list[str]:
        notes = []
        for folder, part in self.parts.items():
            own = [one for one in placements if one.file.rpartition('/')[0] == folder]
            notes += part.check_loading(export.parts[folder], own)
        return notes

    def write_hf_assets(
        self, export: CompositeExport, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]
    ) -> list[str]:
        warnings = []
        for name, part in self.parts.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            own_tokenizer = tokenizer if name == self.tokenizer_folder else None
            warnings += part.write_hf_assets(export.parts[name], folder / name, own_tokenizer, eos_token_ids)
        return warnings


def names_read_by(entries: Iterable[ExportEntry]) -> set[str]:
    """Names of the source tensors that the entries are made of."""
    return {name for entry in entries for name in entry.reads}


def names_left_out(specs: Iterable[TensorSpec], entries: Iterable[ExportEntry]) -> list[str]:
    """Names of the source tensors of which nothing is written, whatever exporter made the entries."""
    read = names_read_by(entries)
    return [spec.name for spec in specs if spec.name not in read]


def unchanged_entries(tensors: Mapping[str, TensorSpec], dtype: str | None, files: FileSet) -> list[ExportEntry]:
    """Entries of tensors that are written as they are, except that floats are cast (:func:`.cast_float`)."""
    return [
        ExportEntry(name, spec.shape, cast_float(spec.dtype, dtype), (spec.name,), file_set=files)
        for name, spec in tensors.items()
    ]


def specs_below(path: str, specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors below ``path``, by each of their names relative to ``path``."""
    prefix = f'{path}.' if path else ''
    return {
        name[len(prefix) :]: spec for spec in specs for name in (spec.name, *spec.aliases) if name.startswith(prefix)
    }
