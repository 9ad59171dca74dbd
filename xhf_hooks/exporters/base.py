"""The interface of exporters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.format.dtypes import is_float
from xhf_hooks.planning.types import ExportEntry, FileSet, TensorSpec

if TYPE_CHECKING:
    from torch import nn


class Exporter(ABC):
    """One kind of model: which of its tensors are written, under which names, and with which HF assets.

    An exporter sees specs, never tensors, until one of its ``combine`` functions is called.

    Attributes:
        base_dir: Folder or hub name that the model was loaded from, '' when there is none.
        left_out: Tensors of the source that are deliberately not written. Known after :meth:`entries`.
        notes: Log messages about that.
        combine_nbytes: The most memory that one ``combine`` allocates. Known after :meth:`entries`.
        options: Options for this kind of model alone; the constructor takes them by name.
    """

    options: tuple[str, ...] = ()
    base_dir: str = ''
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    combine_nbytes: int = 0

    @classmethod
    @abstractmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        """Whether this exporter knows such a model."""

    @abstractmethod
    def __init__(self, model: nn.Module, module: str | None) -> None: ...

    @abstractmethod
    def entries(self, specs: Sequence[TensorSpec], dtype: str | None) -> list[ExportEntry]:
        """What is written, in the order of ``save_pretrained``. Runs on: all ranks, with the same result.

        Args:
            specs: What the source holds.
            dtype: Safetensors dtype to cast floats to; None keeps them as trained.

        Raises:
            ModelError: The model is not what ``from_pretrained`` will build.
        """

    @property
    @abstractmethod
    def n_parameters(self) -> int | Mapping[str, int | None] | None:
        """For the index file, or by folder for several; None leaves it out. Known after :meth:`entries`."""

    @abstractmethod
    def base_tokenizer(self) -> Any | None:
        """The base model's tokenizer; None when it has none. Runs on: rank 0."""

    @abstractmethod
    def write_hf_assets(self, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]) -> list[str]:
        """Write every file that is not weights, and make the folders of the entries. Runs on: rank 0.

        Called after :meth:`entries`.

        Args:
            eos_token_ids: To add to those of the model.

        Returns:
            Warnings for the log.
        """


def unchanged_entries(tensors: Mapping[str, TensorSpec], dtype: str | None, files: FileSet) -> list[ExportEntry]:
    """Tensors by HF name that are written as they are, with floats cast to ``dtype`` unless it is None."""
    return [
        ExportEntry(
            name,
            spec.shape,
            dtype if dtype is not None and is_float(spec.dtype) else spec.dtype,
            (spec.name,),
            file_set=files,
        )
        for name, spec in tensors.items()
    ]


def specs_below(path: str, specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    """Every name of every tensor below ``path``, relative to it; tied tensors have several."""
    prefix = f'{path}.' if path else ''
    return {
        name[len(prefix) :]: spec for spec in specs for name in (spec.name, *spec.aliases) if name.startswith(prefix)
    }
