"""The interface of exporters, and tensors that are computed from others.

A computed tensor, such as a merged LoRA weight, replaces one of its inputs: it is named, compared, converted and
planned like any other, and the last step adds the other inputs to its entries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from xhf_hooks.format.dtypes import AS_IN_BASE, is_float
from xhf_hooks.planning.types import Combine, ExportEntry, FileSet, TensorSpec

if TYPE_CHECKING:
    from torch import nn


class Exporter(ABC):
    """Decides for one kind of model which tensors are written, under which names, and with which HF assets.

    Only its ``combine`` functions see tensors; everything else works on specs.

    Attributes:
        base_dir: Folder or hub name that the model was loaded from; '' if unknown.
        left_out: Tensors of the source that are intentionally not written. Set by :meth:`entries`.
        notes: Messages for the log.
        combine_nbytes: Largest allocation of one ``combine`` call, in bytes. Set by :meth:`entries`.
        options: Names of additional options; the constructor takes them as keyword arguments.
    """

    options: tuple[str, ...] = ()
    base_dir: str = ''
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    combine_nbytes: int = 0

    @classmethod
    @abstractmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        """Whether this exporter can export the model."""

    @abstractmethod
    def __init__(self, model: nn.Module, module: str | None) -> None: ...

    @abstractmethod
    def entries(self, specs: Sequence[TensorSpec], dtype: str | None) -> list[ExportEntry]:
        """The tensors to write, in the order of ``save_pretrained``. Runs on: all ranks, with the same result.

        Args:
            specs: The tensors of the source.
            dtype: Safetensors dtype to cast floats to, except those that the class keeps in fp32; AS_IN_BASE: each as
                in the base model's files; None keeps the training dtype.

        Raises:
            ModelError: The model differs from what ``from_pretrained`` will build.
        """

    @property
    @abstractmethod
    def n_parameters(self) -> int | Mapping[str, int | None] | None:
        """``total_parameters`` for the index file, by folder if there are several; None omits the field."""

    @abstractmethod
    def base_tokenizer(self) -> Any | None:
        """The base model's tokenizer; None if it has none. Runs on: rank 0."""

    @abstractmethod
    def write_hf_assets(self, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]) -> list[str]:
        """Write all files except the weights, and create the folders of the entries. Runs on: rank 0.

        Called after :meth:`entries`.

        Args:
            eos_token_ids: Token ids to add to the model's own.

        Returns:
            Warnings for the log.
        """


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


class ComputedTensor(Protocol):
    """Computes one tensor from gathered tensors, given by source name. Called on the rank that writes.

    Attributes:
        base: The source tensor that it replaces.
        reads: Its inputs, including the base.
    """

    @property
    def base(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor: ...


def with_computed(entries: Sequence[ExportEntry], computed: Mapping[str, ComputedTensor]) -> list[ExportEntry]:
    """Make entries that read a replaced tensor read its inputs instead, and compute it first.

    Args:
        computed: Computations by the name of the tensor that they replace.
    """
    made: dict[int | str, _ComputeFirst] = {}
    result = []
    for entry in entries:
        found = [computed[name] for name in entry.reads if name in computed]
        if found:
            key = entry.hf_name if entry.combine is None else id(entry.combine)
            then = entry.combine or _Renamed(entry.hf_name, entry.reads[0])
            combine = made.setdefault(key, _ComputeFirst(tuple(found), then))
            reads = [*entry.reads, *(name for one in found for name in one.reads)]
            entry = replace(entry, reads=tuple(dict.fromkeys(reads)), combine=combine, source_offset=None)
        result.append(entry)
    return result


@dataclass(frozen=True)
class _ComputeFirst:
    found: tuple[ComputedTensor, ...]
    then: Combine

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self.then({**tensors, **{one.base: one(tensors) for one in self.found}})


@dataclass(frozen=True)
class _Renamed:
    hf_name: str
    read: str

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {self.hf_name: tensors[self.read]}
