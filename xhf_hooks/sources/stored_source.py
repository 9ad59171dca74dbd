"""Sources of which it is known where in files each tensor's bytes lie."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.sources.file_source import FileSource
from xhf_hooks.sources.piece_reader import PieceReader
from xhf_hooks.sources.pieces import Piece, StoredTensor


class StoredSource(FileSource):
    """Reads slices of the files and casts them on the way; holds no tensor.

    Runs on: one process, or several that each got it by fork or pickle, or several threads.
    """

    def __init__(self) -> None:
        self._reader = PieceReader()
        self._tensors: dict[str, StoredTensor] = {}

    def pieces(self, name: str, *, use_fp32_master: bool) -> tuple[Piece, ...]:
        """Where the values lie; one after the other they are the row-major tensor.

        Args:
            use_fp32_master: The fp32 master if there is one. Else what gives the training dtype: 16-bit weights where
                the files have them (stages 0 to 2), fp32 slices whose cast they are otherwise (stage 3).
        """
        tensor = self._tensors[name]
        return tensor.master if use_fp32_master and tensor.master is not None else tensor.trained

    def stored_nbytes(self, names: Collection[str], *, use_fp32_master: bool) -> int:
        return sum(piece.nbytes for name in names for piece in self.pieces(name, use_fp32_master=use_fp32_master))

    def read_into(self, name: str, start: int, out: memoryview, dtype: str, *, use_fp32_master: bool) -> int:
        """Cast ``len(out) / width`` elements from element ``start`` on into ``out``. Memory: a few MB.

        With ``use_fp32_master=False`` and another ``dtype`` than the training dtype, values are first rounded to the
        training dtype, as the hook's are. With ``use_fp32_master=True`` they are rounded once, from the master.

        Args:
            out: Writable bytes, of a mapped file for example.
            dtype: Safetensors dtype to write.

        Returns:
            How many finite elements became infinite.

        Raises:
            CheckpointError: A file can't be read any more.
        """
        if not len(out):
            return 0
        target = torch.frombuffer(out, dtype=TORCH_DTYPES[dtype])
        return self._read(name, start, target, use_fp32_master=use_fp32_master)

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], use_fp32_master: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """Whole tensors in fresh memory, for entries that are made of several (``combine``)."""
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
        return self._reader.read_into(stored.master, start, out, beside=stored if stored.copy else None)
