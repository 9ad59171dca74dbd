"""Sources whose tensors have known places in files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.sources.file_source import FileSource
from xhf_hooks.sources.piece_reader import PieceReader
from xhf_hooks.sources.pieces import Piece, StoredTensor


class StoredSource(FileSource):
    """Reads slices of files and casts them; holds no tensors.

    Runs on: one process, several that received it by fork or pickle, or several threads.
    """

    def __init__(self) -> None:
        self._reader = PieceReader()
        self._tensors: dict[str, StoredTensor] = {}

    def pieces(self, name: str, *, use_fp32_master: bool) -> tuple[Piece, ...]:
        """The pieces of a tensor; concatenated, they are the row-major tensor.

        Args:
            use_fp32_master: Prefer the fp32 master. Otherwise the pieces give the training dtype: 16-bit weights where
                the files have them (stages 0 to 2), else fp32 slices to be cast (stage 3).
        """
        tensor = self._tensors[name]
        return tensor.master if use_fp32_master and tensor.master is not None else tensor.trained

    def stored_nbytes(self, names: Collection[str], *, use_fp32_master: bool) -> int:
        return sum(piece.nbytes for name in names for piece in self.pieces(name, use_fp32_master=use_fp32_master))

    def read_into(self, name: str, start: int, out: memoryview, dtype: str, *, use_fp32_master: bool) -> int:
        """Cast elements from ``start`` on into ``out``, as many as fit. Needs a few MB of memory.

        With ``use_fp32_master=True`` values are rounded once, from the master. Otherwise they are rounded to the
        training dtype first, as the hook saves them.

        Args:
            out: Writable bytes, for example of a mapped file.
            dtype: Safetensors dtype to write.

        Returns:
            The number of finite elements that became infinite.

        Raises:
            CheckpointError: A file can no longer be read.
        """
        if not len(out):
            return 0
        target = torch.frombuffer(out, dtype=TORCH_DTYPES[dtype])
        return self._read(name, start, target, use_fp32_master=use_fp32_master)

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], use_fp32_master: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """Whole tensors in new memory, for outputs that ``combine`` makes from several tensors."""
        tensors = {}
        for name in names:
            if name in wanted:
                stored = self._tensors[name]
                dtype = 'F32' if use_fp32_master and stored.master is not None else stored.dtype
                tensors[name] = torch.empty(stored.shape, dtype=TORCH_DTYPES[dtype])
                self._read(name, 0, tensors[name].view(-1), use_fp32_master=use_fp32_master)
        yield tensors

    def _read(self, name: str, start: int, out: torch.Tensor, *, use_fp32_master: bool) -> int:
        stored = self._tensors[name]
        if not use_fp32_master or stored.master is None:
            return self._reader.read_into(stored.trained, start, out, TORCH_DTYPES[stored.dtype])
        return self._reader.read_into(stored.master, start, out)
