"""Sources that read any slice of any tensor from files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.base import Source

if TYPE_CHECKING:
    import torch
    from torch import nn


class FileSource(Source):
    """A source in files. Conversions read it with several threads at once."""

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Never: this source is not made from a live model."""
        return False

    @abstractmethod
    def read_into(self, name: str, start: int, out: memoryview, dtype: str, *, use_fp32_master: bool) -> int:
        """Fill ``out`` with the elements from ``start`` on, cast; return how many finite ones became infinite."""

    @abstractmethod
    def stored_nbytes(self, names: Collection[str], *, use_fp32_master: bool) -> int:
        """Number of bytes to read from the files for these tensors."""


class JoinedSource(FileSource):
    """Tensors of several sources, renamed.

    Args:
        tensors: Maps each spec to the source that holds the tensor and to its name there.
    """

    def __init__(self, tensors: Mapping[TensorSpec, tuple[FileSource, str]]) -> None:
        self._specs = list(tensors)
        self._places = {spec.name: place for spec, place in tensors.items()}

    def specs(self) -> list[TensorSpec]:
        return list(self._specs)

    def read_into(self, name: str, start: int, out: memoryview, dtype: str, *, use_fp32_master: bool) -> int:
        source, there = self._places[name]
        return source.read_into(there, start, out, dtype, use_fp32_master=use_fp32_master)

    def stored_nbytes(self, names: Collection[str], *, use_fp32_master: bool) -> int:
        return sum(
            source.stored_nbytes([there], use_fp32_master=use_fp32_master)
            for source, there in (self._places[name] for name in names)
        )

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], use_fp32_master: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        found = {}
        for name in wanted:
            source, there = self._places[name]
            with source.gathered([there], wanted=[there], use_fp32_master=use_fp32_master) as tensors:
                found[name] = tensors[there]
        yield found


def renamed(spec: TensorSpec, names: Sequence[str]) -> TensorSpec:
    """The spec with other names: the first becomes its name, the others its aliases."""
    return replace(spec, name=names[0], aliases=tuple(names[1:]))
