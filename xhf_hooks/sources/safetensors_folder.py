"""The weights of a Hugging Face folder as a source: the base model of a run that did not save all of it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.files.regular_files import read_regular_text
from xhf_hooks.format.dtypes import TORCH_DTYPES, is_float
from xhf_hooks.format.safetensors import read_header
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.checkpoint.records import Piece
from xhf_hooks.sources.file_source import FileSource
from xhf_hooks.sources.piece_reader import PieceReader

if TYPE_CHECKING:
    import torch

_WHOLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'


class SafetensorsSource(FileSource):
    """``model.safetensors``, or the files that its index names.

    Args:
        dtype: The dtype that training gave its floats (DeepSpeed casts the whole model); None keeps them.

    Raises:
        CheckpointError: There are no such files, or one is damaged.
    """

    def __init__(self, folder: Path, dtype: str | None) -> None:
        self.folder = folder
        self._dtype = dtype
        self._pieces: dict[str, Piece] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._reader = PieceReader()
        for file in _files(folder):
            self._read_header(file)

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, shape, self._trained_dtype(name)) for name, shape in self._shapes.items()]

    def read_into(self, name: str, start: int, out: memoryview, dtype: str, *, use_fp32_master: bool) -> int:
        import torch

        target = torch.frombuffer(out, dtype=TORCH_DTYPES[dtype]) if out.nbytes else None
        if target is None:
            return 0
        through = TORCH_DTYPES[self._trained_dtype(name)]
        return self._reader.read_into((self._pieces[name],), start, target, through)

    def stored_nbytes(self, names: Collection[str], *, use_fp32_master: bool) -> int:
        return sum(self._pieces[name].nbytes for name in names)

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], use_fp32_master: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        import torch

        found = {}
        for name in wanted:
            found[name] = torch.empty(self._shapes[name], dtype=TORCH_DTYPES[self._trained_dtype(name)])
            self._reader.read_into((self._pieces[name],), 0, found[name].view(-1))
        yield found

    def _trained_dtype(self, name: str) -> str:
        stored = self._pieces[name].dtype
        return self._dtype if self._dtype is not None and is_float(stored) else stored

    def _read_header(self, path: Path) -> None:
        try:
            entries = read_header(path).entries
        except DamagedError as error:
            raise CheckpointError(f'{error}; copy the base model again') from None
        for entry in entries:
            if entry.dtype not in TORCH_DTYPES:
                raise CheckpointError(f'{path}: {entry.name[:200]}: {entry.dtype} cannot be read here')
            self._pieces[entry.name] = Piece(path, entry.start, entry.dtype, math.prod(entry.shape))
            self._shapes[entry.name] = entry.shape


def holds_weights(folder: Path) -> bool:
    """Whether safetensors of a model lie in the folder, as far as names tell."""
    return (folder / _INDEX).is_file() or (folder / _WHOLE).is_file()


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(read_regular_text(index))['weight_map'].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f'{index}: cannot be read ({error}); copy the base model again') from None
        files = [folder / Path(name).name for name in names]
    else:
        files = [folder / _WHOLE]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f'{folder / missing[0]}: missing, and weights that training left alone are read from it; copy it, too'
        )
    return files
