"""Reads a pickle as data: pickle's own machine, with stand-ins for everything that the pickle names.

A pickle can call only what :meth:`DataUnpickler.find_class` returns: functions of this module for tensors and plain
containers, or a fresh class that records its arguments (:class:`.Global`). It cannot change them either: pickle sets
attributes by ``__setstate__``, which each of them has.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

from xhf_hooks.errors import XhfError
from xhf_hooks.sources.checkpoint.inert import Global, Inert, UnsafePickle
from xhf_hooks.sources.checkpoint.tensors import make_tensor


def load_pickle(file: BinaryIO, persistent: Callable[[Any], Any]) -> Any:
    """Read one pickle; the file is then behind it.

    Args:
        persistent: Turns a persistent id (untrusted data) into an object.

    Returns:
        The object, made of plain values and containers, :class:`.LazyTensor`, :class:`.Global` and :class:`.Inert`.

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


_CONSTRUCTORS = {
    ('torch._utils', '_rebuild_tensor'): _Constructor(partial(make_tensor, '_rebuild_tensor')),
    ('torch._utils', '_rebuild_tensor_v2'): _Constructor(partial(make_tensor, '_rebuild_tensor_v2')),
    ('torch._utils', '_rebuild_tensor_v3'): _Constructor(partial(make_tensor, '_rebuild_tensor_v3')),
    ('torch._utils', '_rebuild_parameter'): _Constructor(lambda data, *others: data),
    ('torch._utils', '_rebuild_parameter_with_state'): _Constructor(lambda data, *others: data),
    ('torch._tensor', '_rebuild_from_type_v2'): _Constructor(_tensor_of_type),
    ('torch', 'Size'): _Constructor(tuple),
    ('collections', 'OrderedDict'): _Constructor(_Dict),
    ('collections', 'defaultdict'): _Constructor(lambda factory=None, *entries: _Dict(*entries)),
    **{
        (module, kind.__name__): _Constructor(kind)
        for module in ('builtins', '__builtin__')
        for kind in (set, frozenset, list, tuple, dict)
    },
    **{(module, 'getattr'): _Constructor(_attribute) for module in ('builtins', '__builtin__')},
}
