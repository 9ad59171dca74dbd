"""Tensors of a pickle as views into a file, validated but not read.

The arguments are those of ``torch._utils._rebuild_tensor_v2`` and its relatives (torch ``_utils.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.format.dtypes import CODES_BY_NAME, CODES_BY_STORAGE
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.format.strict_json import is_count
from xhf_hooks.sources.checkpoint.inert import Global, UnsafePickle
from xhf_hooks.sources.pieces import Piece

_MAX_DIMS = 64


class _OnlyFromItsArguments:
    """Refuses what a pickle may do to an object once it is made."""

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickle(f'a state is given to a {type(self).__name__}')


@dataclass(frozen=True)
class Storage(_OnlyFromItsArguments):
    """Bytes of a file, viewed by tensors.

    Attributes:
        dtype: Safetensors dtype; None for dtypes that it does not have (quantized, complex128).
        locate: Maps ``key`` to the storage's offset in the file; called when a tensor is read.
    """

    file: Path
    key: str
    dtype: str | None
    nbytes: int
    locate: Callable[[str], int]


@dataclass(frozen=True)
class LazyTensor(_OnlyFromItsArguments):
    """A tensor in a file. ``start`` is the offset in its storage, in elements."""

    storage: Storage
    dtype: str | None
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for tensors that view the same bytes."""
        return self.storage.file, self.storage.key, self.dtype, self.start, self.shape, self.stride

    def piece(self, first: int = 0, numel: int | None = None) -> Piece:
        """Elements ``first`` to ``first + numel`` of a contiguous tensor, or all of any tensor."""
        offset = self.storage.locate(self.storage.key) + (self.start + first) * DTYPE_NBYTES[self.dtype]
        if self.is_contiguous:
            return Piece(self.storage.file, offset, self.dtype, self.numel if numel is None else numel)
        return Piece(self.storage.file, offset, self.dtype, self.numel, self.shape, self.stride)


def make_storage(typename: Any, key: Any, numel: Any, file: Path, locate: Callable[[str], int]) -> Storage:
    """The storage of a persistent id: type, key and number of elements.

    Raises:
        UnsafePickle: One of them has another type.
    """
    if not isinstance(typename, Global) or type(key) is not str or not is_count(numel):
        raise UnsafePickle('a storage without type, key and size')
    known = typename.module in ('torch', 'torch.storage', 'torch.cuda')
    code = CODES_BY_STORAGE.get(typename.name) if known else None
    return Storage(file, key, code, numel * DTYPE_NBYTES[code] if code else 0, locate)


def make_tensor(function: str, *args: Any) -> LazyTensor:
    """The tensor that ``torch._utils`` would rebuild.

    Raises:
        UnsafePickle: It does not fit into its storage, or an argument has the wrong type.
    """
    if len(args) < 4 or not isinstance(args[0], Storage):
        raise UnsafePickle(f'{function} without a storage')
    storage, start, shape, stride = args[:4]
    dtype = storage.dtype
    if function == '_rebuild_tensor_v3':
        dtype = as_dtype(args[6]) if len(args) > 6 else None
    elif function == '_rebuild_tensor_v2' and len(args) > 6 and args[6]:
        raise UnsafePickle('a conjugated or negated view, which is not supported; save it after .resolve_conj()')
    if not (isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride) <= _MAX_DIMS):
        raise UnsafePickle('a tensor with an invalid shape or stride')
    if not all(map(is_count, (start, *shape, *stride))):
        raise UnsafePickle('a tensor with a negative or too large size, stride or offset')
    if dtype is not None and math.prod(shape):
        last = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        needed = (last + 1) * DTYPE_NBYTES[dtype]
        if needed > storage.nbytes:
            raise UnsafePickle(
                f'a tensor of shape {str(shape)[:80]} needs {needed} bytes, but its storage has {storage.nbytes}'
            )
    return LazyTensor(storage, dtype, start, shape, stride)


def as_dtype(value: Any) -> str | None:
    """The safetensors dtype of a ``torch.dtype``; None for other values and unsupported dtypes."""
    return CODES_BY_NAME.get(value.name) if isinstance(value, Global) and value.module == 'torch' else None
