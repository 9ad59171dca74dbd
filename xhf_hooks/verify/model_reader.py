"""Reads the tensors of a model by name and in pieces, from a folder, a file or a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.format import strict_json
from xhf_hooks.format.safetensors import DTYPE_NBYTES, Header, read_header
from xhf_hooks.integrity.file_reader import FileReader
from xhf_hooks.integrity.findings import Findings
from xhf_hooks.integrity.folder_scan import read_headers, scan
from xhf_hooks.planning.types import TensorSpec

INPUT_EMBEDDINGS = ('embed_tokens.weight', 'wte.weight', 'tok_embeddings.weight', 'word_embeddings.weight')
OUTPUT_EMBEDDINGS = ('lm_head.weight', 'output.weight')


class ModelReader(ABC):
    """A model on disk. Thread-safe.

    Attributes:
        tensors: Its tensors by name, in file order.
        ties: Maps each alias to the name of the same tensor in :attr:`tensors`.
        label: Path, number of tensors and dtypes, for the report.
        notes: Remarks for the report.
    """

    tensors: dict[str, TensorSpec]
    ties: dict[str, str]
    label: str
    notes: list[str]

    @abstractmethod
    def view(self, name: str, start: int, end: int, buffer: memoryview) -> memoryview:
        """The tensor's row-major bytes from ``start`` to ``end``, in the mapped file or in ``buffer``.

        Raises:
            OSError, XhfError: They cannot be read.
        """

    def forget(self, name: str, start: int, end: int) -> None:
        """Hint that these bytes are not needed again soon. Their view must have been released."""
        return None

    def made_together(self, name: str) -> tuple[str, ...]:
        """Names of tensors computed from the same inputs, to be read together; () for a tensor that is stored as is."""
        return ()

    @contextmanager
    def held(self, names: Sequence[str]) -> Iterator[None]:
        """Inside the block, tensors that are computed together are computed only once."""
        yield

    def close(self) -> None:
        """Close the files. Those of a source close when it is garbage collected."""
        return None


class SafetensorsReader(ModelReader):
    """A Hugging Face folder or a single file. Tensors of subfolders are named ``folder/tensor``.

    Raises:
        CheckpointError: A file is damaged, or has a dtype that cannot be compared.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors, self.ties, self.notes = {}, {}, []
        self._files: list[FileReader] = []
        self._places: dict[str, tuple[FileReader, int]] = {}
        for prefix, header in _headers_of_file(path) if path.is_file() else _headers_of_folder(path):
            file = FileReader(header.path, header.nbytes)
            self._files.append(file)
            for entry in header.entries:
                if entry.dtype not in DTYPE_NBYTES:
                    raise CheckpointError(f'{header.path}: {entry.name}: {entry.dtype} cannot be compared')
                name = prefix + entry.name
                if name in self.tensors:
                    raise CheckpointError(f'{path}: {name[:200]} is stored twice; check it with xhf-verify {path}')
                self.tensors[name] = TensorSpec(name, entry.shape, entry.dtype)
                self._places[name] = (file, entry.start)
        self.ties = _ties(path, self.tensors)
        dtypes = ', '.join(sorted({tensor.dtype for tensor in self.tensors.values()})) or 'none'
        self.label = f'{path} ({len(self.tensors)} tensors, {dtypes})'

    def view(self, name: str, start: int, end: int, buffer: memoryview) -> memoryview:
        file, offset = self._places[name]
        return file.view(offset + start, offset + end, buffer)

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
    """Each header, with the prefix for its tensors' names."""
    findings, content = Findings(), scan(path)
    for name, kind in content.special.items():
        raise CheckpointError(f'{path / name}: {kind}, not a regular file')
    folders = read_headers(content, findings)
    if findings.has_problem():
        raise CheckpointError(findings.texts('problem')[0])
    return [(folder.prefix, header) for folder in folders for header in folder.loaded().values()]


def _ties(path: Path, tensors: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Aliases of tied embeddings, if config.json ties them and only one is stored."""
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
