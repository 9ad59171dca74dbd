"""Entries of traced tensors: which tensors of the source each output is made of, and how.

Two steps lead from a file to the source: name in the file -> name in the model (what ``save_pretrained`` does), name in
the model -> name in the source (what the exporter does: a merged adapter, a resized embedding).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import torch

from xhf_hooks.exporters.traced import TracedTensor, replay
from xhf_hooks.format.dtypes import dtype_code
from xhf_hooks.format.index import WEIGHTS_NAME, WEIGHTS_SUFFIX
from xhf_hooks.planning.types import ExportEntry, FileSet

_FP32_NBYTES = 4  # computed in fp32; the cast overlaps the previous write


@dataclass(frozen=True, eq=False)
class CombineByReplay:
    """Makes outputs of gathered tensors: the ``combine`` of their entries. Runs on: the rank that writes.

    Attributes:
        outputs: Traced tensors by name in the file. Their sources are names in the model. :func:`entries_of` fills it.
        own: The model's tensors by name, made of tensors of the source.
    """

    outputs: dict[str, TracedTensor]
    own: Mapping[str, TracedTensor]

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        needed = {name: self.own[name] for output in self.outputs.values() for name in output.sources}
        return replay(self.outputs, replay(needed, tensors))


def entries_of(weights: Mapping[str, Mapping[str, TracedTensor]], own: Mapping[str, TracedTensor]) -> list[ExportEntry]:
    """The entries of files that ``save_pretrained`` would write (:mod:`.ask_save`), in its order.

    Args:
        weights: Traced tensors by name, by the path of the file. Their sources are names in the model.
        own: The model's tensors by these names, made of tensors of the source.
    """
    order = {name: number for number, name in enumerate(own)}
    entries = []
    for file, tensors in weights.items():
        # Outputs that are made of the same tensors are made together
        combines: dict[tuple[str, ...], CombineByReplay] = {}
        for hf_name, tensor in tensors.items():
            shape, dtype = tensor.shape_and_dtype
            made_of = [own[name] for name in sorted(tensor.sources, key=order.__getitem__)]
            reads = tuple(dict.fromkeys(name for one in made_of for name in one.sources))
            entry = ExportEntry(hf_name, shape, dtype_code(dtype), reads, file_set=_file_set(file))
            offset = _offset(tensor, own) if len(reads) == 1 else None
            is_unchanged = offset == 0 and made_of[0].is_source and made_of[0].shape_and_dtype[0] == shape
            if not is_unchanged:
                combine = combines.setdefault(reads, CombineByReplay({}, own))
                combine.outputs[hf_name] = tensor
                entry = replace(entry, combine=combine, source_offset=offset)
            entries.append(entry)
    return entries


def _offset(tensor: TracedTensor, own: Mapping[str, TracedTensor]) -> int | None:
    """The offset of a contiguous output in its only source; None for another output."""
    part = tensor.element_range
    of_own = None if part is None else own[part.source].element_range
    return None if part is None or of_own is None else of_own.offset + part.offset


def _file_set(file: str) -> FileSet:
    if file == WEIGHTS_NAME:
        return FileSet()
    path = PurePosixPath(file)
    folder = '' if str(path.parent) == '.' else str(path.parent)
    return FileSet(folder, path.name.removesuffix(WEIGHTS_SUFFIX), may_split=False)


def computing_nbytes(entries: Sequence[ExportEntry], tensors: Iterable[TracedTensor]) -> int:
    """Peak memory for outputs that are computed together: some are cut out of computed tensors as copies.

    Args:
        tensors: Made of tensors of the source. Those that are no range of one, such as a merged weight, are computed.
    """
    computed_of = {name for one in tensors if one.element_range is None for name in one.sources}
    together: dict[int, list[ExportEntry]] = {}
    for entry in entries:
        if entry.combine is not None and not computed_of.isdisjoint(entry.reads):
            together.setdefault(id(entry.combine), []).append(entry)
    return max(map(_combine_nbytes, together.values()), default=0)


def _combine_nbytes(together: Sequence[ExportEntry]) -> int:
    computed = sum(math.prod(entry.shape) for entry in together) * _FP32_NBYTES
    return computed * min(len(together), 2) + 2 * max(entry.nbytes for entry in together)
