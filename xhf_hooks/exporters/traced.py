"""Tensors on the meta device that record what is done to them, so that it can be done to real tensors later.

transformers and peft rename, cut, join and permute weights when they save and load them, by rules that differ between
versions. They are given traced tensors, and what comes out says which named tensors each output is made of, and how.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

#: Operations whose result has the elements of their tensor, in its order; a cast is that of the save or of the run.
_COPIES = frozenset(('bfloat16', 'clone', 'contiguous', 'cpu', 'detach', 'double', 'float', 'half', 'to', 'type'))
#: Operations that read values, for which a traced tensor has a stand-in; those of at most so many elements.
_READS_VALUES = frozenset(('equal', 'is_nonzero', 'item', 'numpy', 'tolist')) | {
    f'__{name}__' for name in ('array', 'bool', 'complex', 'float', 'format', 'index', 'int', 'repr')
}
_MAX_VALUES = 10**6
#: Operations that move a tensor, which one on the meta device cannot do.
_MOVES = frozenset(('cpu', 'cuda', 'to'))
_GET_DEVICE = torch.Tensor.device.__get__
#: Farther apart than any tensor is large.
_ADDRESSES = itertools.count(2**50, 2**50)


class ChangedInPlaceError(RuntimeError):
    """A traced tensor was used after a change in place of it, or of what it is made of; such changes are not recorded.

    Others may be changed: transformers 5 initialises what a parametrization computes of weights that it has loaded.
    """


class ValueStandIn:
    """The number that all elements of some traced tensors seem to have.

    Attributes:
        was_read: Whether code has read a value, so that what it writes may depend on one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.was_read = False


@dataclass(frozen=True, eq=False)
class _Operation:
    """One call of a function.

    Attributes:
        function: Is called again with real tensors in place of the traced ones.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class ElementRange:
    """Consecutive elements of one source, in its order. ``offset`` is the index of the first."""

    source: str
    offset: int


@dataclass(frozen=True)
class _Storage:
    """What libraries ask of the memory of a traced tensor, to find tied ones. A part has one of its own.

    Of real tensors, a part of another has the other's memory, and huggingface_hub puts both into one file.
    """

    address: int
    size: int

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


class TracedTensor(torch.Tensor):
    """A tensor without values that knows what it is made of. :func:`traced` makes the first ones.

    Attributes:
        sources: The names of what it is made of, in the order of use.
    """

    sources: tuple[str, ...]
    _operation: _Operation | None  # None: it is a source itself
    _result_index: int | None  # in the operation's results, if there are several
    # Its elements as a view of its only source, of which it may be a copy in another order in memory; None: it is none
    _view: torch.Tensor | None
    _stand_in: ValueStandIn | None
    _changes: list[str]  # the functions that have changed it in place; shared by those with the same elements
    _address: int  # of its first element; tied tensors have the same

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name in _READS_VALUES:
            return func(*tree_map(_with_values, args), **tree_map(_with_values, kwargs))
        if name == 'data_ptr':
            return args[0]._address
        if name == 'untyped_storage':
            return _Storage(args[0]._address, args[0].nbytes)
        if name == '__get__' and func == _GET_DEVICE and args[0]._stand_in is not None:
            return torch.device('cpu')  # versions of transformers look for offloaded tensors on the meta device
        if name in _MOVES:
            func, args, kwargs = torch.Tensor.to, (args[0], _dtype_asked_for(args, kwargs)), {}
        with torch._C.DisableTorchFunctionSubclass():
            if name == '__get__' and not isinstance(result := func(*args), torch.Tensor):
                return result  # such as the shape, which is asked for often
            operands = _traced_in((args, kwargs))
            versions = [one._version for one in operands]
            result = func(*args, **kwargs)
            for one, version in zip(operands, versions, strict=True):
                if name != '__get__' and one._version != version:
                    one._changes.append(name)
            if any(result is one for one in operands):
                return result
            operation = _Operation(func, args, kwargs)
            if isinstance(result, torch.Tensor):
                return _made(result, operands, operation, None, _view_of_source(operation, operands, result))
            if isinstance(result, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in result):
                views = _view_of_source(operation, operands, result) or [None] * len(result)
                made = [_made(one, operands, operation, i, views[i]) for i, one in enumerate(result)]
                return type(result)(made)
        return result

    @property
    def is_source(self) -> bool:
        """Whether nothing has been done to it."""
        return self._operation is None

    def require_unchanged(self) -> None:
        """Refuse it if it was changed in place, or is made of what was.

        Raises:
            ChangedInPlaceError: It was.
        """
        if self._changes:
            raise ChangedInPlaceError(f'{self._changes[0]} has changed {", ".join(self.sources)} in place')

    @property
    def element_range(self) -> ElementRange | None:
        """Which consecutive elements of one source it has, in their order; None if it has others."""
        self.require_unchanged()
        if self._view is None or not self._view.is_contiguous():
            return None
        return ElementRange(self.sources[0], self._view.storage_offset())

    @property
    def shape_and_dtype(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Its shape and dtype, without the cost of asking a traced tensor."""
        self.require_unchanged()
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(self.shape), self.dtype


def traced(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    stand_in: ValueStandIn | None = None,
    tied: TracedTensor | None = None,
) -> TracedTensor:
    """A source with this name.

    Args:
        stand_in: What code that reads values gets; None: reading raises.
        tied: Another source, whose memory it appears to share.
    """
    empty = torch.empty(tuple(shape), dtype=dtype, device='meta')
    made = empty.as_subclass(TracedTensor)
    made.sources, made._operation, made._result_index, made._changes = (name,), None, None, []
    made._view, made._stand_in = empty, stand_in
    made._address = next(_ADDRESSES) if tied is None else tied._address
    return made


def computed(
    shape: Sequence[int], dtype: torch.dtype, function: Callable[..., torch.Tensor], *args: Any
) -> TracedTensor:
    """What a function makes of traced tensors in its arguments. It is not called before :func:`replay`."""
    empty = torch.empty(tuple(shape), dtype=dtype, device='meta')
    with torch._C.DisableTorchFunctionSubclass():
        return _made(empty, _traced_in(args), _Operation(function, args, {}), None, None)


def replay(
    made: Mapping[str, TracedTensor], values: Mapping[str, torch.Tensor], *, with_copies: bool = True
) -> dict[str, torch.Tensor]:
    """Make tensors, by name, of the values of their sources. What several of them need is made once.

    Args:
        with_copies: Whether to repeat copies, which cast tensors and move them to other devices. Loading moves them to
            the meta device, and casts them as its model needs them.
    """
    results: dict[int, Any] = {}

    def value_of(one: Any) -> Any:
        if not isinstance(one, TracedTensor):
            return one
        operation = one._operation
        if operation is None:
            return values[one.sources[0]]
        if not with_copies and operation.function.__name__ in _COPIES:
            return value_of(_traced_in((operation.args, operation.kwargs))[0])
        if id(operation) not in results:
            args, kwargs = tree_map(value_of, (operation.args, operation.kwargs))
            results[id(operation)] = operation.function(*args, **kwargs)
        result = results[id(operation)]
        return result if one._result_index is None else result[one._result_index]

    return {name: value_of(one) for name, one in made.items()}


def _made(
    result: torch.Tensor,
    operands: Sequence[TracedTensor],
    operation: _Operation,
    result_index: int | None,
    view: torch.Tensor | None,
) -> TracedTensor:
    """A result of an operation on traced tensors, with what it is made of."""
    made = result.as_subclass(TracedTensor)
    made.sources = operands[0].sources
    if len(operands) > 1:
        made.sources = tuple(dict.fromkeys(name for one in operands for name in one.sources))
    made._operation, made._result_index, made._stand_in = operation, result_index, operands[0]._stand_in
    storage = result.untyped_storage()._cdata
    viewed = [one for one in operands if one.untyped_storage()._cdata == storage]
    made._changes = viewed[0]._changes if viewed else [change for one in operands for change in one._changes]
    made._address = next(_ADDRESSES) if not viewed else viewed[0]._address + _start(result) - _start(viewed[0])
    made._view = view
    return made


def _start(tensor: torch.Tensor) -> int:
    """Where the first element is in its memory, in bytes."""
    return tensor.storage_offset() * tensor.element_size()


def _view_of_source(operation: _Operation, operands: Sequence[TracedTensor], result: Any) -> Any:
    """The result, or each of several, as a view of its only source; None if it is computed."""
    of_operand = operands[0]._view
    if len(operands) != 1 or of_operand is None:
        return None
    first, operand = result if isinstance(result, torch.Tensor) else result[0], operands[0]
    if operation.function.__name__ in _COPIES and first.shape == operand.shape:
        return of_operand
    storage = first.untyped_storage()._cdata
    if storage != operand.untyped_storage()._cdata or first.dtype != operand.dtype:
        return None
    if storage == of_operand.untyped_storage()._cdata:
        return result
    with suppress(RuntimeError):  # view() of what is not contiguous in the source
        args, kwargs = tree_map(lambda one: of_operand if one is operand else one, (operation.args, operation.kwargs))
        return operation.function(*args, **kwargs)
    return None


def _traced_in(value: Any) -> list[TracedTensor]:
    if isinstance(value, TracedTensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in _traced_in(item)]


def _dtype_asked_for(args: Any, kwargs: Mapping[str, Any]) -> torch.dtype:
    """The dtype of what ``to`` and its like make of a tensor, given as it or by another tensor; else its own."""
    with torch._C.DisableTorchFunctionSubclass():
        given = [one.dtype if isinstance(one, torch.Tensor) else one for one in (*args[1:], *kwargs.values())]
        return next((one for one in given if isinstance(one, torch.dtype)), args[0].dtype)


def _with_values(value: Any) -> Any:
    if not isinstance(value, TracedTensor):
        return value
    shape, dtype = value.shape_and_dtype
    if value._stand_in is None or math.prod(shape) > _MAX_VALUES:
        raise NotImplementedError('tensors on the meta device have no values')
    value._stand_in.was_read = True
    return torch.full(shape, value._stand_in.number, dtype=dtype)
