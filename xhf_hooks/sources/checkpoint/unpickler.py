"""Reads a pickle as data: pickle's own machine, with stand-ins for everything that the pickle names.

A pickle can call only what :meth:`DataUnpickler.find_class` returns: functions of this module for tensors and plain
containers, or a fresh class that records its arguments (:class:`Global`). It cannot change them either: pickle sets
attributes by ``__setstate__``, which each of them has.
"""

from __future__ import annotations

import gc
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from xhf_hooks.errors import XhfError
from xhf_hooks.format.dtypes import CODES_BY_NAME, CODES_BY_STORAGE
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.format.strict_json import is_count
from xhf_hooks.sources.stored_source import Piece

_MAX_DIMS = 64


class UnsafePickle(Exception):
    """The pickle is damaged, or was not written by torch.save."""


class Inert(dict):
    """An object of a pickle, as data: its class, arguments, and what was set on it. Compared by identity.

    A dict, since many are of subclasses of dict, such as MMEngine's ConfigDict, which is pickled as
    ``ConfigDict({...})`` (mmengine ``config/config.py``, ``__reduce_ex__``).

    Attributes:
        args: Arguments of the constructor.
        state: The argument of ``__setstate__`` or update of ``__dict__``; None if there is none.
        appended: Items appended to it.
    """

    __slots__ = ('appended', 'args', 'state')
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]
    args: tuple[Any, ...]
    state: Any
    appended: list[Any]

    def __new__(cls, *args: Any, **keywords: Any) -> Inert:
        made = super().__new__(cls)
        made.args, made.state, made.appended = args, keywords or None, []
        if len(args) == 1 and isinstance(args[0], dict):
            made.update(args[0])
        return made

    def __init__(self, *args: Any, **keywords: Any) -> None:
        """Nothing: all is set by then."""

    # What pickle does with an object after making it

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.appended.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self.appended.extend(items)

    add = append

    @property
    def made_by(self) -> Global:
        """The constructor's name."""
        return type(self)  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f'<{self.made_by}>'  # the data may be huge


class Global(type):
    """The name of an importable object in a pickle. As a class, it makes :class:`Inert` objects of its own.

    pickle insists on a class wherever it makes an object by ``__new__``.
    """

    module: str
    name: str

    def __new__(mcs, module: str, name: str) -> Global:
        return super().__new__(mcs, 'Inert', (Inert,), {'__slots__': (), 'module': module, 'name': name})

    def __init__(cls, module: str, name: str) -> None:
        super().__init__('Inert', (Inert,), {})

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, Global) and (cls.module, cls.name) == (other.module, other.name)

    def __hash__(cls) -> int:
        return hash((cls.module, cls.name))

    def __str__(cls) -> str:
        return f'{cls.module}.{cls.name}'


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
    """The tensor that a function of torch's ``_utils.py`` would rebuild: a view into the file, not read.

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


def load_pickle(file: BinaryIO, persistent: Callable[[Any], Any]) -> Any:
    """Read one pickle; the file is then behind it.

    Args:
        persistent: Turns a persistent id (untrusted data) into an object.

    Returns:
        The object, made of plain values and containers, :class:`.LazyTensor`, :class:`Global` and :class:`Inert`.

    Raises:
        UnsafePickle: It is damaged, or makes tensors that it cannot make.
        OSError: The file cannot be read.
    """
    try:
        with _no_collections():
            return DataUnpickler(file, persistent).load()
    except (UnsafePickle, XhfError, OSError):
        raise
    except Exception as error:  # pickle raises whatever an instruction with wrong operands comes to
        told = ' '.join(f'{type(error).__name__}: {error}'.split())
        raise UnsafePickle(f'damaged ({told[:200]})') from error


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turn the garbage collector off: it would scan millions of new objects many times, none of them garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class DataUnpickler(pickle.Unpickler):
    """See :func:`load_pickle`."""

    def __init__(self, file: BinaryIO, persistent: Callable[[Any], Any]) -> None:
        super().__init__(file, encoding='latin1')  # for str of Python 2
        self._persistent = persistent
        self._names: dict[tuple[str, str], Any] = dict(_CONSTRUCTORS)

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name."""
        found = self._names.get((module, name))
        if found is None:
            found = self._names[module, name] = Global(module, name)
        return found

    def persistent_load(self, pid: Any) -> Any:
        """The object of a persistent id."""
        return self._persistent(pid)


class _Constructor:
    """A function that a pickle may call, and cannot change."""

    __slots__ = ('_make',)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickle('a state is given to a name')


class _Dict(dict):
    """OrderedDict or defaultdict. Attributes, such as ``_metadata`` of a state dict, are not needed."""

    def __setstate__(self, state: Any) -> None:
        return None


def _tensor_of_type(function: Any, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """``torch._tensor._rebuild_from_type_v2``: a tensor with Python attributes, or of a subclass."""
    if not isinstance(function, (_Constructor, Global)):
        raise UnsafePickle(f'a tensor is rebuilt by a {type(function).__name__}')
    made = function(*args)
    if isinstance(made, Inert):
        made.state = state
    return made


def _attribute(owner: Any, name: Any) -> Global:
    """``getattr``, with which Python 3.11 pickles the members of an enum."""
    if not isinstance(owner, Global) or type(name) is not str:
        raise UnsafePickle(f'an attribute of a {type(owner).__name__}')
    return Global(owner.module, f'{owner.name}.{name}')


_BUILTINS = ('builtins', '__builtin__')
_CONSTRUCTORS = {
    **{
        ('torch._utils', name): _Constructor(partial(make_tensor, name))
        for name in ('_rebuild_tensor', '_rebuild_tensor_v2', '_rebuild_tensor_v3')
    },
    ('torch._utils', '_rebuild_parameter'): _Constructor(lambda data, *others: data),
    ('torch._utils', '_rebuild_parameter_with_state'): _Constructor(lambda data, *others: data),
    ('torch._tensor', '_rebuild_from_type_v2'): _Constructor(_tensor_of_type),
    ('torch', 'Size'): _Constructor(tuple),
    ('collections', 'OrderedDict'): _Constructor(_Dict),
    ('collections', 'defaultdict'): _Constructor(lambda factory=None, *entries: _Dict(*entries)),
    **{
        (module, kind.__name__): _Constructor(kind)
        for module in _BUILTINS
        for kind in (set, frozenset, list, tuple, dict)
    },
    **{(module, 'getattr'): _Constructor(_attribute) for module in _BUILTINS},
}

#: Members of DeepSpeed's ZeroStageEnum, for pickles of Python 3.11, which store members by name.
_ZERO_STAGES = {'disabled': 0, 'optimizer_states': 1, 'gradients': 2, 'weights': 3}


def as_int(value: Any) -> int | None:
    """The value of a 64-bit int or an enum member; None for other values.

    Enum members are pickled as ``Class(value)``; Python 3.11 pickles ``getattr(Class, 'member')``.
    """
    if isinstance(value, Inert) and len(value.args) == 1 and value.made_by.name == 'ZeroStageEnum':
        value = value.args[0]
    if isinstance(value, Global):
        owner, _, member = value.name.rpartition('.')
        return _ZERO_STAGES.get(member) if owner == 'ZeroStageEnum' else None
    return value if type(value) is int and -(2**63) <= value < 2**63 else None
