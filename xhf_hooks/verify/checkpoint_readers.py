"""Reads training checkpoints for a comparison: as ``xhf-convert`` would write them, or as stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from xhf_hooks.convert import Conversion
from xhf_hooks.format.dtypes import host_bytes
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.planning.types import Group, Placement, TensorSpec
from xhf_hooks.sources.file_source import FileSource, renamed
from xhf_hooks.sources.gather import group_chunks
from xhf_hooks.telemetry.memory import MemoryMeter
from xhf_hooks.verify.model_reader import ModelReader


class ConvertedReader(ModelReader):
    """The tensors that ``xhf-convert`` would write, computed on the fly.

    Args:
        ties: Maps each tied name that is not written to the one that is.
    """

    def __init__(self, conversion: Conversion, label: str, notes: Sequence[str], ties: dict[str, str]) -> None:
        self.label, self.notes, self.ties = label, list(notes), ties
        self._source, self._use_fp32_master = conversion.source, conversion.use_fp32_master
        self._made: dict[str, memoryview] = {}
        groups = (*conversion.plan.sliced, *conversion.plan.gathered)
        self._places = {_name(placement): (group, placement) for group in groups for placement in group.placements}
        self.tensors = {name: TensorSpec(name, p.shape, p.dtype) for name, (_, p) in self._places.items()}

    def view(self, name: str, start: int, end: int, buffer: memoryview) -> memoryview:
        group, placement = self._places[name]
        if not group.is_contiguous:
            return self._made[name][start:end]
        out, first = buffer[: end - start], placement.source_offset + start // DTYPE_NBYTES[placement.dtype]
        read = group.reads[0].name
        self._source.read_into(read, first, out, placement.dtype, use_fp32_master=self._use_fp32_master)
        return out

    def made_together(self, name: str) -> tuple[str, ...]:
        group, _ = self._places[name]
        return () if group.is_contiguous else tuple(map(_name, group.placements))

    @contextmanager
    def held(self, names: Sequence[str]) -> Iterator[None]:
        groups = {id(group): group for group, _ in map(self._places.__getitem__, names) if not group.is_contiguous}
        try:
            for group in groups.values():
                self._make(group)
            yield
        finally:
            self._made.clear()

    def _make(self, group: Group) -> None:
        reads = [spec.name for spec in group.reads]
        with (
            self._source.gathered(reads, wanted=reads, use_fp32_master=self._use_fp32_master) as tensors,
            torch.no_grad(),
        ):
            chunks = group_chunks(group, tensors, 0, host_bytes, MemoryMeter())
            self._made |= {_name(chunk.placement): chunk.data for chunk in chunks}


class NamedReader(ModelReader):
    """The tensors of a checkpoint with their names and dtypes in training.

    Args:
        prefix: Removed from names that begin with it.
    """

    def __init__(self, source: FileSource, label: str, notes: Sequence[str], prefix: str = '') -> None:
        self.label, self.notes = label, list(notes)
        self._source = source
        self._names = {spec.name.removeprefix(prefix): spec.name for spec in source.specs()}
        self.tensors, self.ties = {}, {}
        for spec in source.specs():
            name, *aliases = (name.removeprefix(prefix) for name in (spec.name, *spec.aliases))
            self.tensors[name] = renamed(spec, [name])
            self.ties |= dict.fromkeys(aliases, name)

    def view(self, name: str, start: int, end: int, buffer: memoryview) -> memoryview:
        out, dtype = buffer[: end - start], self.tensors[name].dtype
        self._source.read_into(self._names[name], start // DTYPE_NBYTES[dtype], out, dtype, use_fp32_master=False)
        return out


def common_prefixes(names: Sequence[str], others: Sequence[str], *, strip_others: bool) -> tuple[str, str]:
    """The prefixes to remove so that most names match, for example ``('llm.', '')``."""
    best, prefixes = 0, ('', '')
    for other in _leading(others) if strip_others else ['']:
        known = {name.removeprefix(other) for name in others}
        for prefix in _leading(names):
            count = len(known.intersection(name.removeprefix(prefix) for name in names))
            if count > best:
                best, prefixes = count, (prefix, other)
    return prefixes


def _leading(names: Sequence[str]) -> list[str]:
    """Dotted prefixes that at least half of the names have, and the empty one."""
    found: dict[str, int] = {}
    for name in names:
        parts = name.split('.')[:-1]
        for end in range(1, len(parts) + 1):
            prefix = '.'.join(parts[:end]) + '.'
            found[prefix] = found.get(prefix, 0) + 1
    return ['', *(prefix for prefix, count in found.items() if 2 * count >= len(names))]


def _name(placement: Placement) -> str:
    folder = placement.file.rpartition('/')[0]
    return f'{folder}/{placement.hf_name}' if folder else placement.hf_name
