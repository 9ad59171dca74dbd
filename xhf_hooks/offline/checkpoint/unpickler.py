"""Reads a pickle as data: pickle's own machine, with stand-ins for everything that the pickle names.

A pickle can call only what :meth:`DataUnpickler.find_class` returns: functions of this module for tensors and plain
containers, or a fresh class that keeps its arguments (:class:`Inert`). It cannot change them either: pickle sets
attributes by ``__setstate__``, which refuses or only keeps the state. Nothing is imported.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import torch

from xhf_hooks.errors import XhfError
from xhf_hooks.format.strict_json import is_count
from xhf_hooks.format.text import error_text
from xhf_hooks.sources.mapped_files import view

#: Names of typed storages in files of ``torch.save``.
_STORAGES = {**torch.storage._storage_type_to_dtype_map(), 'UntypedStorage': torch.uint8}
#: Members of DeepSpeed's ZeroStageEnum, which Python 3.11 pickles as ``getattr(ZeroStageEnum, name)``.
_ZERO_STAGES = {'disabled': 0, 'optimizer_states': 1, 'gradients': 2, 'weights': 3}


class UnsafePickle(Exception):
    """The pickle is damaged, or was not written by torch.save."""


class Inert(dict):
    """An object of a class that is not imported, as data. Compared by identity.

    A dict, since many are of subclasses of dict, such as MMEngine's ConfigDict, which is pickled as
    ``ConfigDict({...})`` (mmengine ``config/config.py``, ``__reduce_ex__``).

    Attributes:
        args: Arguments of the constructor.
        state: The state that pickle would set on the object; None if there is none.
    """

    __slots__ = ('args', 'state')
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **keywords: Any) -> Inert:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any, **keywords: Any) -> None:
        if len(args) == 1 and isinstance(args[0], dict):
            self.update(args[0])

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, items: Any) -> None:
        """Forget what pickle adds to lists and sets: it is not needed."""

    extend = add = append

    def __repr__(self) -> str:
        return f'<{type(self).__module__}.{type(self).__name__}>'  # the data may be huge


class Storage(NamedTuple):
    """Bytes of a file and the dtype that tensors view them as. Without attributes that a pickle could set."""

    data: torch.UntypedStorage
    dtype: torch.dtype


class _Dict(dict):
    """OrderedDict or defaultdict. Attributes, such as ``_metadata`` of a state dict, are not needed."""

    def __setstate__(self, state: Any) -> None:
        return None


class _Function:
    """A function that a pickle may call, and cannot change."""

    __slots__ = ('_function',)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickle('a state is given to a name')


def _tensor(storage: Any, start: Any, shape: Any, stride: Any, *more: Any) -> torch.Tensor:
    """The tensor that ``_rebuild_tensor``, ``_v2`` and ``_v3`` of torch's ``_utils.py`` build."""
    if not isinstance(storage, Storage) or not all(map(is_count, (start, *shape, *stride))):
        raise UnsafePickle('a tensor without a storage, or with a negative size, stride or offset')
    if any(isinstance(each, dict) and {'conj', 'neg'} & each.keys() for each in more):
        raise UnsafePickle('a conjugated or negated view, which is not supported; save it after .resolve_conj()')
    dtype = next((each for each in more if isinstance(each, torch.dtype)), storage.dtype)  # of _v3
    return view(storage.data, dtype, start, shape, stride)


_tensor_function, _first = _Function(_tensor), _Function(lambda first, *more: first)
_CONSTRUCTORS: dict[tuple[str, str], Any] = {
    ('torch._utils', '_rebuild_tensor'): _tensor_function,
    ('torch._utils', '_rebuild_tensor_v2'): _tensor_function,
    ('torch._utils', '_rebuild_tensor_v3'): _tensor_function,
    ('torch._utils', '_rebuild_parameter'): _first,
    ('torch._utils', '_rebuild_parameter_with_state'): _first,
    # A tensor with Python attributes, or of a subclass
    ('torch._tensor', '_rebuild_from_type_v2'): _Function(lambda function, kind, args, state: function(*args)),
    ('torch', 'Size'): tuple,
    ('collections', 'OrderedDict'): _Dict,
    ('collections', 'defaultdict'): _Function(lambda factory=None, *entries: _Dict(*entries)),
    ('builtins', 'getattr'): _Function(lambda owner, name: _ZERO_STAGES.get(name)),
    **{('builtins', kind.__name__): kind for kind in (set, frozenset, list, tuple, dict)},
}


class DataUnpickler(pickle.Unpickler):
    """Reads a pickle as data: stand-ins take the place of all that it names, and nothing is imported."""

    def __init__(self, file: BinaryIO, persistent: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._persistent = persistent
        self._names = dict(_CONSTRUCTORS)

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name."""
        module = 'builtins' if module == '__builtin__' else module
        found = self._names.get((module, name))
        if found is None:
            found = _STORAGES.get(name, vars(torch).get(name)) if module.partition('.')[0] == 'torch' else None
            if not isinstance(found, torch.dtype):
                found = type(name, (Inert,), {'__slots__': (), '__module__': module})
            self._names[module, name] = found
        return found

    def persistent_load(self, pid: Any) -> Any:
        """The object of a persistent id."""
        return self._persistent(pid)


def load_pickle(file: BinaryIO, persistent: Callable[[Any], Any]) -> Any:
    """Read one pickle; the file is then behind it.

    Args:
        persistent: Turns a persistent id (untrusted data) into an object.

    Returns:
        The object, made of plain values and containers, tensors, dtypes, and objects and classes of :class:`Inert`.

    Raises:
        UnsafePickle: It is damaged, or makes tensors that it cannot make.
        OSError: The file cannot be read.
    """
    try:
        return DataUnpickler(file, persistent).load()
    except (UnsafePickle, XhfError, OSError):
        raise
    except Exception as error:  # pickle raises whatever an instruction with wrong operands comes to
        raise UnsafePickle(f'damaged ({error_text(error)})') from error


def as_int(value: Any) -> int | None:
    """The value of a 64-bit int or of an enum member, pickled as ``Class(value)``; None for other values."""
    value = value.args[0] if isinstance(value, Inert) and len(value.args) == 1 else value
    return value if type(value) is int and -(2**63) <= value < 2**63 else None
