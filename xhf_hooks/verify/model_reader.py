"""The tensors of a model, wherever it lies, by name and in pieces."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.files.holes import Range, find_holes, within
from xhf_hooks.files.mapped_file import MappedFile, map_or_none
from xhf_hooks.files.regular_files import open_regular_fd
from xhf_hooks.format import strict_json
from xhf_hooks.format.safetensors import DTYPE_NBYTES, Header, read_header
from xhf_hooks.format.text import size_text
from xhf_hooks.integrity.checksums import read_exactly
from xhf_hooks.integrity.findings import Findings
from xhf_hooks.integrity.folder_scan import read_headers, scan

INPUT_EMBEDDINGS = ('embed_tokens.weight', 'wte.weight', 'tok_embeddings.weight', 'word_embeddings.weight')
OUTPUT_EMBEDDINGS = ('lm_head.weight', 'output.weight')
_LEAST_HOLE_NBYTES = 1 << 20


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that can be read."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class ModelReader(ABC):
    """A model on disk. Reading is safe from several threads.

    Attributes:
        tensors: What it holds, in file order.
        ties: Name to another name of the same tensor, which is in :attr:`tensors`.
        label: Where it is and what kind, for people.
        notes: What the user should know.
    """

    tensors: dict[str, TensorInfo]
    ties: dict[str, str]
    label: str
    notes: list[str]

    @abstractmethod
    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` with the tensor's row-major bytes from ``start`` on.

        Raises:
            OSError, XhfError: It cannot be read.
        """

    def view(self, name: str, start: int, end: int) -> memoryview | None:
        """The tensor's bytes from ``start`` to ``end`` where they lie; None when they have to be read.

        Raises:
            OSError: They cannot be read.
        """
        return None

    def forget(self, name: str, start: int, end: int) -> None:
        """Such a view has been released, and is not needed again soon."""
        return None

    def holes(self, name: str) -> list[Range]:
        """Bytes of the tensor that were never written, from and to: they are zeros, and need not be read."""
        return []

    def made_together(self, name: str) -> tuple[str, ...]:
        """Tensors that are made of the same ones, and should be read together; () when it is read as it lies."""
        return ()

    @contextmanager
    def held(self, names: Sequence[str]) -> Iterator[None]:
        """While it is open, reading these that are made together costs no second making."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Close the files."""


class SafetensorsReader(ModelReader):
    """A Hugging Face folder; tensors of folders in it are named ``folder/tensor``. Or a single file.

    Raises:
        CheckpointError: It holds no whole safetensors files, or a dtype that cannot be compared.
    """

    def __init__(self, path: Path) -> None:
        self.tensors, self.ties, self.notes = {}, {}, []
        self._places: dict[str, tuple[int, int]] = {}
        self._fds: list[int] = []
        self._maps: dict[int, MappedFile] = {}
        self._holes: dict[int, list[Range]] = {}
        headers = self._headers_of_file(path) if path.is_file() else self._headers_of_folder(path)
        for prefix, header in headers:
            fd = open_regular_fd(header.path)
            self._fds.append(fd)
            mapped = map_or_none(fd, header.nbytes)
            if mapped is not None:
                self._maps[fd] = mapped
            self._holes[fd] = find_holes(fd, header.nbytes, _LEAST_HOLE_NBYTES)
            unwritten = sum(end - start for start, end in self._holes[fd])
            if unwritten:
                size, total = size_text(unwritten), size_text(header.nbytes)
                self.notes.append(f'{header.path}: {size} of {total} are holes: never written, and read as zeros')
            for entry in header.entries:
                if entry.dtype not in DTYPE_NBYTES:
                    raise CheckpointError(f'{header.path}: {entry.name}: {entry.dtype} cannot be compared')
                name = prefix + entry.name
                if name in self.tensors:
                    raise CheckpointError(
                        f'{path}: {name[:200]} is there twice; check the folder with verify.py {path}'
                    )
                self.tensors[name] = TensorInfo(entry.shape, entry.dtype, entry.end - entry.start)
                self._places[name] = (fd, entry.start)
        self.ties = _ties(path, self.tensors)
        self.label = f'{path} ({len(self.tensors)} tensors, {_dtypes(self.tensors)})'

    @staticmethod
    def _headers_of_file(path: Path) -> list[tuple[str, Header]]:
        try:
            return [('', read_header(path))]
        except DamagedError as error:
            raise CheckpointError(str(error)) from None

    @staticmethod
    def _headers_of_folder(path: Path) -> list[tuple[str, Header]]:
        findings = Findings()
        content = scan(path)
        for name, kind in content.special.items():
            raise CheckpointError(f'{path / name}: {kind}, not a regular file')
        folders = read_headers(content, findings)
        if findings.has_problem():
            raise CheckpointError(findings.texts('problem')[0])
        return [(f'{f.name}/' if f.name else '', header) for f in folders for header in f.loaded().values()]

    def read(self, name: str, start: int, out: memoryview) -> None:
        fd, offset = self._places[name]
        read_exactly(fd, offset + start, out)

    def view(self, name: str, start: int, end: int) -> memoryview | None:
        fd, offset = self._places[name]
        return self._maps[fd].view(offset + start, offset + end) if fd in self._maps else None

    def holes(self, name: str) -> list[Range]:
        fd, offset = self._places[name]
        end = offset + self.tensors[name].nbytes
        return [(first - offset, last - offset) for first, last in within(self._holes[fd], offset, end)]

    def forget(self, name: str, start: int, end: int) -> None:
        fd, offset = self._places[name]
        if fd in self._maps:
            self._maps[fd].forget(offset + start, offset + end)

    def close(self) -> None:
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def _ties(path: Path, tensors: dict[str, TensorInfo]) -> dict[str, str]:
    """Of a config.json that ties the embeddings: the one that is stored once stands for both."""
    try:
        config = strict_json.read(path / 'config.json')
    except DamagedError:
        return {}
    inputs = [name for name in tensors if name.endswith(INPUT_EMBEDDINGS)]
    outputs = [name for name in tensors if name.endswith(OUTPUT_EMBEDDINGS)]
    if config.get('tie_word_embeddings') is not True or len(inputs) + len(outputs) != 1:
        return {}
    if inputs:
        return dict.fromkeys(OUTPUT_EMBEDDINGS, inputs[0])
    return {f'model.{name}': outputs[0] for name in INPUT_EMBEDDINGS}


def _dtypes(tensors: dict[str, TensorInfo]) -> str:
    return ', '.join(sorted({tensor.dtype for tensor in tensors.values()})) or 'none'
