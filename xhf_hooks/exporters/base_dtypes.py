"""``dtype='base'``: each tensor gets the dtype that it has in the base model's files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xhf_hooks.errors import OptionError
from xhf_hooks.exporters.assets.base_files import LocatedBase
from xhf_hooks.format.dtypes import CODES_BY_NAME, is_float
from xhf_hooks.format.index import WEIGHTS_NAME, weight_files
from xhf_hooks.format.safetensors import read_header
from xhf_hooks.planning.types import ExportEntry

#: What the option ``dtype`` can name; 8-bit and quantized weights belong to scales that training does not have.
_WRITABLE = ('F32', 'BF16', 'F16')


@dataclass(frozen=True)
class BaseDtypes:
    """The dtypes in the files of a base model.

    Attributes:
        of_tensor: By name in the files.
        most: The dtype of most floating-point elements; that of tensors that the base does not have.
        of_model: The dtype in its config.json, else ``most``.
    """

    base_name: str
    of_tensor: Mapping[str, str]
    most: str
    of_model: str

    def applied_to(self, entries: Sequence[ExportEntry], prefix: str) -> list[ExportEntry]:
        """The entries with the base's dtypes.

        Args:
            prefix: ``base_model_prefix`` of the class; names with and without it are the same for ``from_pretrained``.

        Raises:
            OptionError: The base has other tensors, or they are quantized.
        """
        found: dict[str, str] = {}
        for entry in entries:
            name = entry.hf_name
            names = (name, f'{prefix}.{name}', name.removeprefix(f'{prefix}.'))
            codes = [self.of_tensor[name] for name in names if name in self.of_tensor]
            if is_float(entry.dtype) and codes:
                found[name] = codes[0]
                if codes[0] not in _WRITABLE:
                    raise _cannot_tell(f'{name} is quantized ({codes[0]}) in {self.base_name}')
        if not found:
            raise _cannot_tell(f'{self.base_name} has no tensor of the trained model by name')
        return [replace(e, dtype=found.get(e.hf_name, self.most)) if is_float(e.dtype) else e for e in entries]


def base_dtypes(base_model: LocatedBase) -> BaseDtypes:
    """Read the headers of the base model's files, from its folder or the local hub cache. Reads no tensors.

    Raises:
        OptionError: It has no safetensors files.
        DamagedError: One of its files cannot be read.
    """
    of_tensor: dict[str, str] = {}
    elements: Counter[str] = Counter()
    for path in _files(base_model):
        for entry in read_header(path).entries:
            of_tensor[entry.name] = entry.dtype
            if entry.dtype in _WRITABLE:
                elements[entry.dtype] += math.prod(entry.shape)
    most = max(elements, key=elements.__getitem__, default='F32')
    content = base_model.read_json('config.json')
    named = CODES_BY_NAME.get(str(content.get('dtype') or content.get('torch_dtype')))
    return BaseDtypes(base_model.name, of_tensor, most, named if named in _WRITABLE else most)


def _files(base_model: LocatedBase) -> list[Path]:
    folder = base_model.folder
    files = [] if folder is None else weight_files(folder)
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        name = missing[0] if missing else WEIGHTS_NAME
        raise _cannot_tell(f'the base model {base_model.name!r} has no {name} on this machine')
    return files


def _cannot_tell(reason: str) -> OptionError:
    return OptionError('dtype', f'another one, since {reason}', 'base')
