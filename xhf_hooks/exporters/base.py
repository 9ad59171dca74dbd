"""The interface of exporters, and exporters with several parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from xhf_hooks.base_model.files import (
    LocatedBase,
    base_of_model,
    is_remote_code,
    warn_of_revisions,
)
from xhf_hooks.base_model.tokenizer import CopiedFiles, load_or_copy_tokenizer
from xhf_hooks.exporters.xtuner.chat_template import tokenizer_for_run
from xhf_hooks.format.dtypes import is_float
from xhf_hooks.format.safetensors import AS_IN_BASE
from xhf_hooks.model import names_by_identity, token_embeddings
from xhf_hooks.planning.types import ExportEntry, FileSet, Placement, TensorSpec

if TYPE_CHECKING:
    from torch import nn


class Exporter(ABC):
    """Decides for one kind of model which tensors are written, under which names, and with which HF assets.

    Only its ``combine`` functions see tensors; everything else works on specs.

    Attributes:
        left_out: Tensors of the source that are intentionally not written. Set by :meth:`entries`.
        adapter_base_tensors: The tensors of a model whose adapter is written alone. That the base is left out goes
            without saying, unless training changes it. Set by :meth:`entries`.
        left_out_trained: The left-out tensors that training changes, as of the last :meth:`look_for_left_out`.
        writes_whole_model: Whether it writes a model of transformers that loads without its base, perhaps among other
            parts.
        carry_base: The option. Set by ``exporter_for``.
        run_config: The config of the run, from which an exporter reads what it needs; empty without one. Set by
            ``exporter_for``.
        tokenizer_of_model: The tokenizer or processor that the trained model itself has. Set by ``exporter_for``.
        whole: The trained model. What is exported may be a part of it, as in a SentenceTransformer, whose other modules
            are saved, too (exporters/surroundings.py). Set by ``exporter_for``.
        notes: Messages for the log.
        combine_nbytes: Largest allocation of one ``combine`` call, in bytes. Set by :meth:`entries`.
        n_parameters: ``total_parameters`` for the index file, by folder if there are several; None omits the field. Set
            by :meth:`entries`.
        options: Names of additional options; the constructor takes them as keyword arguments.
    """

    options: tuple[str, ...] = ()
    _model: Any = None  # the transformers model whose base has the tokenizer and other files
    left_out: tuple[str, ...] = ()
    adapter_base_tensors: frozenset[str] = frozenset()
    left_out_trained: tuple[str, ...] = ()
    writes_whole_model: bool = False
    carry_base: str | None = None
    run_config: Mapping[str, Any] = MappingProxyType({})
    tokenizer_of_model: Any | None = None
    whole: nn.Module | None = None
    notes: tuple[str, ...] = ()
    combine_nbytes: int = 0
    n_parameters: int | Mapping[str, Any] | None = None

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        """Whether this exporter can export the model. Registered exporters override it."""
        return False

    def look_for_left_out(self, model: nn.Module) -> bool:
        """Renew :attr:`left_out_trained`; returns whether it has changed to a new list of names.

        Args:
            model: The trained model, whose names are those of the source.
        """
        left_out, before = set(self.left_out), self.left_out_trained
        parameters = [(names[0], tensor) for tensor, names in names_by_identity(model)] if left_out else []
        self.left_out_trained = tuple(name for name, tensor in parameters if tensor.requires_grad and name in left_out)
        return bool(self.left_out_trained) and self.left_out_trained != before

    @abstractmethod
    def entries(self, specs: Sequence[TensorSpec], dtype: str | None) -> list[ExportEntry]:
        """The tensors to write, in the order of ``save_pretrained``. Runs on: all ranks, with the same result.

        Args:
            dtype: Safetensors dtype to cast floats to, except those that the class keeps in fp32; AS_IN_BASE: each as
                in the base model's files; None keeps the training dtype.

        Raises:
            ModelError: The model differs from what ``from_pretrained`` will build.
        """

    def check_loading(self, placements: Sequence[Placement]) -> list[str]:
        """Load what will be written, without weights, and return notes on what could not be checked. Runs on: rank 0.

        Called after :meth:`entries`, before anything is written.

        Raises:
            ModelError: It would not load, or as another model.
        """
        return []

    def is_outdated(self) -> bool:
        """Whether the model's config is another one than :meth:`entries` found, so that saves must be planned again."""
        return False

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

    def with_chat_template_of_training(
        self, tokenizer: Any | None, *, may_import: bool = True
    ) -> tuple[Any | None, Sequence[int], Sequence[str]]:
        """The tokenizer to write, with the chat template of training; EOS token ids of answers, and log messages.

        Runs on: rank 0.

        Args:
            may_import: Whether to import a template that the run's config names, other than XTuner's.

        Raises:
            OptionError: The template does not exist, is ambiguous, or XTuner could not train with it.
        """
        return tokenizer_for_run(tokenizer, self.run_config, may_import=may_import)

    @property
    def n_base_tokens(self) -> int:
        """The number of tokens of :meth:`base_tokenizer`; 0 if there is none, or it is not loaded. Runs on: rank 0."""
        base = self.base_model
        if base.n_tokens is None:
            tokenizer = self.base_tokenizer()
            base.n_tokens = 0 if tokenizer is None or isinstance(tokenizer, CopiedFiles) else len(tokenizer)
        return base.n_tokens

    @abstractmethod
    def write_hf_assets(self, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]) -> list[str]:
        """Write all files except the weights, create the entries' folders, and return warnings. Runs on: rank 0.

        Called after :meth:`entries`.

        Args:
            eos_token_ids: Token ids to add to the model's own.
        """


class CompositeExporter(Exporter):
    """Base class of exporters with several parts, which the constructor sets.

    Attributes:
        parts: Exporters by folder, relative to the checkpoint (``''`` is the checkpoint itself).
        tokenizer_folder: Folder of the part that gets the tokenizer; None if no part gets it.
    """

    parts: dict[str, Exporter]
    tokenizer_folder: str | None = ''

    def entries(self, specs: Sequence[TensorSpec], dtype: str | None) -> list[ExportEntry]:
        entries = []
        for folder, part in self.parts.items():
            part.carry_base, part.run_config = self.carry_base, self.run_config
            for entry in part.entries(specs, dtype):
                inside = '/'.join(filter(None, (folder, entry.file_set.folder)))
                entries.append(replace(entry, file_set=replace(entry.file_set, folder=inside)))
        self.combine_nbytes = max(part.combine_nbytes for part in self.parts.values())
        self.n_parameters = {folder: part.n_parameters for folder, part in self.parts.items()}
        left_out = [set(part.left_out) for part in self.parts.values()]
        self.left_out = tuple(spec.name for spec in specs if all(spec.name in names for names in left_out))
        self.adapter_base_tensors = frozenset().union(*(part.adapter_base_tensors for part in self.parts.values()))
        return entries

    @property
    def writes_whole_model(self) -> bool:  # type: ignore[override]
        return any(part.writes_whole_model for part in self.parts.values())

    def is_outdated(self) -> bool:
        return any(part.is_outdated() for part in self.parts.values())

    def check_loading(self, placements: Sequence[Placement]) -> list[str]:
        notes = []
        for folder, part in self.parts.items():
            notes += part.check_loading([one for one in placements if one.file.rpartition('/')[0] == folder])
        return notes

    def write_hf_assets(self, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]) -> list[str]:
        warnings = []
        for name, part in self.parts.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            own_tokenizer = tokenizer if name == self.tokenizer_folder else None
            warnings += part.write_hf_assets(folder / name, own_tokenizer, eos_token_ids)
        return warnings


def unchanged_entries(tensors: Mapping[str, TensorSpec], dtype: str | None, files: FileSet) -> list[ExportEntry]:
    """Entries of tensors that are written as they are, except that floats are cast to ``dtype``.

    There is no cast with None, nor with AS_IN_BASE: the base has no such tensors.
    """
    return [
        ExportEntry(
            name,
            spec.shape,
            dtype if dtype not in (None, AS_IN_BASE) and is_float(spec.dtype) else spec.dtype,
            (spec.name,),
            file_set=files,
        )
        for name, spec in tensors.items()
    ]


def specs_below(path: str, specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors below ``path``, by each of their names relative to ``path``."""
    prefix = f'{path}.' if path else ''
    return {
        name[len(prefix) :]: spec for spec in specs for name in (spec.name, *spec.aliases) if name.startswith(prefix)
    }
