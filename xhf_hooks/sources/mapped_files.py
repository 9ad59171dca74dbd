"""Files whose bytes are tensors: mapped into memory, so that nothing is read before it is used."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from xhf_hooks.errors import CheckpointError
from xhf_hooks.system.files import allow_open_files

COPY_HINT = 'copy or download it again, or take another iteration'


@dataclass(frozen=True)
class MappedFile:
    """The bytes of a file, or of a part of it. They must not be written, and the file must not shrink meanwhile.

    Not torch.UntypedStorage.from_file: its private mappings may not be larger than the machine's memory.
    """

    path: Path
    data: memoryview

    @classmethod
    def open(cls, path: Path) -> MappedFile:
        """Map a file.

        Raises:
            CheckpointError: It is empty.
            OSError: It cannot be opened.
        """
        allow_open_files(1, 'each mapped file')
        with path.open('rb') as file:
            if not os.fstat(file.fileno()).st_size:
                raise CheckpointError(f'{path}: empty file; {COPY_HINT}')
            return cls(path, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))

    def part(self, start: int, nbytes: int) -> MappedFile:
        """A part of the file as a file of its own."""
        if not 0 <= start <= start + nbytes <= len(self.data):
            raise CheckpointError(
                f'{self.path}: truncated: expected {start + nbytes} bytes, found {len(self.data)}; {COPY_HINT}'
            )
        return MappedFile(self.path, self.data[start : start + nbytes])

    def storage(self, start: int, nbytes: int) -> torch.UntypedStorage:
        """Bytes for tensors to view."""
        data = self.part(start, nbytes).data
        if not nbytes:
            return torch.UntypedStorage(0)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', UserWarning)  # that it is not writable
            return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor that begins at byte ``start``, wherever that is."""
        numel = torch.Size(shape).numel()
        return view(self.storage(start, numel * dtype.itemsize), dtype, 0, shape)


def view(
    storage: torch.UntypedStorage, dtype: torch.dtype, start: int, shape: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    """A tensor that views a storage. torch refuses sizes that go beyond it.

    Args:
        stride: Default: contiguous.
    """
    if not stride and shape:
        stride = torch.empty(tuple(shape), device='meta').stride()
    return torch.empty(0, dtype=dtype).set_(storage, start, tuple(shape), tuple(stride))
