"""The tensors of a model, wherever it lies, by name and in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.files.holes import Range, within
from xhf_hooks.format import strict_json
from xhf_hooks.format.safetensors import DTYPE_NBYTES, Header, read_header
from xhf_hooks.format.text import size_text
from xhf_hooks.integrity.file_reader import FileReader
from xhf_hooks.integrity.findings import Findings
from xhf_hooks.integrity.folder_scan import read_headers, scan
from xhf_hooks.planning.types import TensorSpec

INPUT_EMBEDDINGS = ('embed_tokens.weight', 'wte.weight', 'tok_embeddings.weight', 'word_embeddings.weight')
OUTPUT_EMBEDDINGS = ('lm_head.weight', 'output.weight')


class ModelReader(ABC):
    """A model on disk. Reading is safe from several threads.

    Attributes:
        tensors: What it holds by name, in file order.
        ties: Name to another name of the same tensor, which is in :attr:`tensors`.
        label: Where it is and what kind, for people.
        notes: What the user should know.
    """

    tensors: dict[str, TensorSpec]
    ties: dict[str, str]
    label: str
    notes: list[str]

    @abstractmethod
    def view(self, name: str, start: int, end: int, buffer: memoryview) -> memoryview:
        """The tensor's row-major bytes from ``start`` to ``end``, where they lie or in ``buffer``.

        Raises:
            OSError, XhfError: They cannot be read.
        """

    def forget(self, name: str, start: int, end: int) -> None:
        """Such a view has been released, and is not needed again soon."""
        return None

    def holes(self, name: str) -> list[Range]:
        """Elements of the tensor that were never written, from and to: they are zeros, and need not be read."""
        return []

    def made_together(self, name: str) -> tuple[str, ...]:
        """Tensors that are made of the same ones, and should be read together; () when it is read as it lies."""
        return ()

    @contextmanager
    def held(self, names: Sequence[str]) -> Iterator[None]:
        """While it is open, reading these that are made together costs no second making."""
        yield

    def close(self) -> None:
        """Close the files; those of a source are closed when nothing refers to them."""
        return None


class SafetensorsReader(ModelReader):
    """A Hugging Face folder; tensors of folders in it are named ``folder/tensor``. Or a single file.

    Raises:
        CheckpointError: It holds no whole safetensors files, or a dtype that cannot be compared.
    """

    def __init__(self, path: Path) -> None:
        self.tensors, self.ties, self.notes = {}, {}, []
        self._files: list[FileReader] = []
        self._places: dict[str, tuple[FileReader, int]] = {}
        for prefix, header in _headers_of_file(path) if path.is_file() else _headers_of_folder(path):
            file = FileReader(header.path, header.nbytes)
            self._files.append(file)
            unwritten = sum(end - start for start, end in file.holes)
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
                self.tensors[name] = TensorSpec(name, entry.shape, entry.dtype)
                self._places[name] = (file, entry.start)
        self.ties = _ties(path, self.tensors)
        dtypes = ', '.join(sorted({tensor.dtype for tensor in self.tensors.values()})) or 'none'
        self.label = f'{path} ({len(self.tensors)} tensors, {dtypes})'

    def view(self, name: str, start: int, end: int, buffer: memoryview) -> memoryview:
        file, offset = self._places[name]
        return file.view(offset + start, offset + end, buffer)

    def holes(self, name: str) -> list[Range]:
        file, offset = self._places[name]
        tensor = self.tensors[name]
        width = DTYPE_NBYTES[tensor.dtype]
        holes = within(file.holes, offset, offset + tensor.nbytes)
        found = [(-(-(start - offset) // width), (end - offset) // width) for start, end in holes]
        return [(start, end) for start, end in found if start < end]

    def forget(self, name: str, start: int, end: int) -> None:
        file, offset = self._places[name]
        file.forget(offset + start, offset + end)

    def close(self) -> None:
        while self._files:
            self._files.pop().close()


def _headers_of_file(path: Path) -> list[tuple[str, Header]]:
    try:
        return [('', read_header(path))]
    except DamagedError as error:
        raise CheckpointError(str(error)) from None


def _headers_of_folder(path: Path) -> list[tuple[str, Header]]:
    """With what comes before the names of its tensors."""
    findings, content = Findings(), scan(path)
    for name, kind in content.special.items():
        raise CheckpointError(f'{path / name}: {kind}, not a regular file')
    folders = read_headers(content, findings)
    if findings.has_problem():
        raise CheckpointError(findings.texts('problem')[0])
    return [(folder.prefix, header) for folder in folders for header in folder.loaded().values()]


def _ties(path: Path, tensors: Mapping[str, TensorSpec]) -> dict[str, str]:
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
