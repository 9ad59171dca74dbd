"""The interface of exporters, and exporters with several parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.base_files import base_dir_of, base_folder, is_remote_code, load_tokenizer
from xhf_hooks.errors import BaseModelError, OptionError
from xhf_hooks.format.dtypes import is_float
from xhf_hooks.format.safetensors import AS_IN_BASE
from xhf_hooks.format.text import error_text
from xhf_hooks.model import names_by_identity
from xhf_hooks.planning.types import ExportEntry, FileSet, Placement, TensorSpec
from xhf_hooks.registry import build_from_config

if TYPE_CHECKING:
    from torch import nn


class Exporter(ABC):
    """Decides for one kind of model which tensors are written, under which names, and with which HF assets.

    Only its ``combine`` functions see tensors; everything else works on specs.

    Attributes:
        left_out: Tensors of the source that are intentionally not written. Set by :meth:`entries`.
        left_out_trained: Those of them that training changes, as of the last :meth:`look_for_left_out`.
        tokenizer_of_model: The tokenizer or processor that the trained model itself has. Set by ``exporter_for``.
        notes: Messages for the log.
        combine_nbytes: Largest allocation of one ``combine`` call, in bytes. Set by :meth:`entries`.
        n_parameters: ``total_parameters`` for the index file, by folder if there are several; None omits the field. Set
            by :meth:`entries`.
        options: Names of additional options; the constructor takes them as keyword arguments.
    """

    options: tuple[str, ...] = ()
    _model: Any = None  # the transformers model whose base has the tokenizer and other files
    left_out: tuple[str, ...] = ()
    left_out_trained: tuple[str, ...] = ()
    tokenizer_of_model: Any | None = None
    notes: tuple[str, ...] = ()
    combine_nbytes: int = 0
    n_parameters: int | Mapping[str, Any] | None = None

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        """Whether this exporter can export the model. Registered exporters override it."""
        return False

    def look_for_left_out(self, model: nn.Module) -> bool:
        """Renew :attr:`left_out_trained`; returns whether there are any, and others than before. Runs on: all ranks.

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

    def rehearse(self, placements: Sequence[Placement]) -> list[str]:
        """Load what will be written, without weights, and return notes on what could not be tried. Runs on: rank 0.

        Called after :meth:`entries`, before anything is written.

        Raises:
            ModelError: It would not load, or as another model.
        """
        return []

    def is_outdated(self) -> bool:
        """Whether the model's config is another one than :meth:`entries` found, so that saves must be planned again."""
        return False

    @property
    def base_dir(self) -> str:
        """Folder or hub name that the model was loaded from; '' if unknown."""
        return '' if self._model is None else base_dir_of(self._model)

    def base_tokenizer(self) -> Any | None:
        """The base model's tokenizer; None if it has none. Its code is trusted if the model's was. Runs on: rank 0."""
        return load_tokenizer(self.base_dir, trust_remote_code=self._model is not None and is_remote_code(self._model))

    @cached_property
    def n_base_tokens(self) -> int:
        """The number of tokens of :meth:`base_tokenizer`; 0 without one. Runs on: rank 0."""
        tokenizer = self.base_tokenizer()
        return 0 if tokenizer is None else len(tokenizer)

    @abstractmethod
    def write_hf_assets(self, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]) -> list[str]:
        """Write all files except the weights, create the entries' folders, and return warnings. Runs on: rank 0.

        Called after :meth:`entries`.

        Args:
            eos_token_ids: Token ids to add to the model's own.
        """


def find_tokenizer(option: Any | None, of_the_run: Any | None, exporter: Exporter) -> tuple[Any | None, list[str]]:
    """The tokenizer of the option, else of the run, else of the base model; and warnings.

    Where the run has only a recipe for one, the tokenizer of the model goes first: it may have got more tokens.

    Raises:
        OptionError: The option names a folder without tokenizer files.
    """
    is_recipe = of_the_run is None or isinstance(of_the_run, (dict, str, Path))
    if is_recipe and exporter.tokenizer_of_model is not None:
        of_the_run = exporter.tokenizer_of_model
    tokenizer = of_the_run if option is None else option
    if isinstance(tokenizer, (str, Path)):
        found = load_tokenizer(str(tokenizer), trust_remote_code=False)
        if found is None:
            raise OptionError('tokenizer', 'a folder with tokenizer files', str(tokenizer))
        return found, []
    if isinstance(tokenizer, dict):
        tokenizer = _built_tokenizer(tokenizer)
    if hasattr(tokenizer, 'save_pretrained'):
        return tokenizer, []
    warnings = []
    if tokenizer is not None:
        found_kind = f'{type(tokenizer).__module__}.{type(tokenizer).__qualname__}'
        warnings.append(f"the run's tokenizer is a {found_kind}, not one of transformers: it is not saved")
    base = f'the base model {exporter.base_dir!r}' if exporter.base_dir else 'a base model'
    tokenizer = exporter.base_tokenizer()
    if tokenizer is None:
        warnings.append(f'no tokenizer will be saved: neither the run nor {base} has one; set the option tokenizer')
    elif warnings:
        warnings.append(f'the tokenizer of {base} will be saved')
    return tokenizer, warnings


def _built_tokenizer(recipe: Mapping[str, Any]) -> Any:
    """What the config describes. An error of the Hub's library about a folder that is not there is said in a line."""
    name = recipe.get('pretrained_model_name_or_path')
    try:
        return build_from_config(recipe)
    except (OSError, ValueError) as error:
        if not isinstance(name, str) or base_folder(name) is not None:
            raise
        raise BaseModelError(
            f'tokenizer of the config ({name!r}): no such folder and not in the cache; set it to the base '
            f"model's folder{_said_by_the_hub(error)}"
        ) from None


def _said_by_the_hub(error: BaseException | None) -> str:
    """Why the Hub did not give it: it is gated, or cannot be reached. '' for what cannot be a name on the Hub."""
    from huggingface_hub.utils import HfHubHTTPError, LocalEntryNotFoundError

    while error is not None:
        if isinstance(error, (HfHubHTTPError, LocalEntryNotFoundError)):
            return f' ({error_text(error)})'
        error = error.__cause__ or error.__context__
    return ''


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
            for entry in part.entries(specs, dtype):
                entries.append(replace(entry, file_set=replace(entry.file_set, folder=folder)))
        self.combine_nbytes = max(part.combine_nbytes for part in self.parts.values())
        self.n_parameters = {folder: part.n_parameters for folder, part in self.parts.items()}
        left_out = [set(part.left_out) for part in self.parts.values()]
        self.left_out = tuple(spec.name for spec in specs if all(spec.name in names for names in left_out))
        return entries

    def is_outdated(self) -> bool:
        return any(part.is_outdated() for part in self.parts.values())

    def rehearse(self, placements: Sequence[Placement]) -> list[str]:
        notes = []
        for folder, part in self.parts.items():
            notes += part.rehearse([one for one in placements if one.file.rpartition('/')[0] == folder])
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
