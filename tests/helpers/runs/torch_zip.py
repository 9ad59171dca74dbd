"""Files in the layout of torch.save, with arbitrary contents."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_torch_zip(path: Path, data_pkl: bytes, storages: Mapping[str, bytes] | None = None, **parts: bytes) -> Path:
    """Write a file; ``parts``: further members of the archive, by name."""
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('archive/data.pkl', data_pkl)
        for key, data in (storages or {}).items():
            archive.writestr(f'archive/data/{key}', data)
        for name, data in parts.items():
            archive.writestr(f'archive/{name}', data)
    return path


class Call:
    """Pickles as a call of ``function`` with ``args``, and ``state`` for BUILD."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self._reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def pickled(value: Any, protocol: int = 2) -> bytes:
    """Pickle a value like torch.save, without tensors."""
    return pickle.dumps(value, protocol=protocol)
