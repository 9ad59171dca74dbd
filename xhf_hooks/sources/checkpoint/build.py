"""What the calls of a pickle would have made: known kinds as plain values, all others as :class:`Inert`."""

from __future__ import annotations

from typing import Any

from xhf_hooks.sources.checkpoint.inert import Global, Inert
from xhf_hooks.sources.checkpoint.tensors import LazyTensor, make_tensor

_MAX_KEY_ITEMS = 16
_MAX_INT_KEY = 2**60
_TENSORS = ('_rebuild_tensor', '_rebuild_tensor_v2', '_rebuild_tensor_v3')
_PARAMETERS = ('_rebuild_parameter', '_rebuild_parameter_with_state')
_DICTS = (Global('collections', 'OrderedDict'), Global('collections', 'defaultdict'))
_BUILTINS = ('builtins', '__builtin__')


class UnsafePickle(ValueError):
    """A pickle that is damaged, absurd, or not of the kind that torch.save writes."""


class Builder:
    """Makes values by name. Names are compared, never imported; nothing of the pickle is called.

    Args:
        max_copies: Items that may be copied in all: a pickle can name one list again and again.
    """

    def __init__(self, max_copies: int) -> None:
        self._copies_left = max_copies

    def make(self, function: Any, args: Any) -> Any:
        """What calling ``function`` would have made; it is compared, never called."""
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise UnsafePickle(f'a {kind_of(function)} is called with a {kind_of(args)}')
        state = None
        if function.module == 'torch._tensor' and function.name == '_rebuild_from_type_v2' and len(args) == 4:
            function, _, args, state = args  # a tensor with Python attributes, or of a class of its own
            if not isinstance(function, Global) or not isinstance(args, tuple):
                raise UnsafePickle(f'a tensor is rebuilt by a {kind_of(function)}')
        if function.module == 'torch._utils':
            if function.name in _TENSORS:
                return make_tensor(function.name, args)
            if function.name in _PARAMETERS and args and isinstance(args[0], LazyTensor):
                return args[0]
        if function in _DICTS:
            return self._ordered_dict(args if function.name == 'OrderedDict' else args[1:])
        if function == Global('torch', 'Size') and len(args) == 1 and isinstance(args[0], (tuple, list)):
            return self._copy(tuple, args[0])
        if function.module in _BUILTINS:
            return self._builtin(function, args)
        made = Inert(function, args)
        made.state = state
        return made

    def _builtin(self, function: Global, args: tuple[Any, ...]) -> Any:
        plain = {'set': set, 'frozenset': frozenset, 'list': list, 'tuple': tuple}.get(function.name)
        if plain and len(args) <= 1 and all(isinstance(a, (list, tuple, set, frozenset)) for a in args):
            items = args[0] if args else ()
            if plain in (set, frozenset):
                return plain(map(as_key, self._copy(list, items)))
            return self._copy(plain, items)
        if function.name == 'dict' and not args:
            return {}
        if function.name == 'getattr' and len(args) == 2 and isinstance(args[0], Global) and type(args[1]) is str:
            self._spend(len(args[0].name) + len(args[1]))
            return Global(args[0].module, f'{args[0].name}.{args[1]}')  # a member of an enum
        return Inert(function, args)

    def _ordered_dict(self, args: tuple[Any, ...]) -> dict[Any, Any]:
        if not args:
            return {}
        pairs = args[0].items() if isinstance(args[0], dict) else args[0]
        self._spend(len(pairs))
        made: dict[Any, Any] = {}
        for key, value in pairs:
            made[as_key(key)] = value
        return made

    def _copy(self, kind: type, items: Any) -> Any:
        self._spend(len(items))
        return kind(items)

    def _spend(self, n_items: int) -> None:
        """A pickle can name one list again and again; copies of it may not outgrow the pickle."""
        self._copies_left -= n_items
        if self._copies_left < 0:
            raise UnsafePickle('copies of its own lists without end')


def as_key(value: Any) -> Any:
    """A key or member of a set, that can be hashed in little time and depth."""
    if isinstance(value, tuple) and len(value) <= _MAX_KEY_ITEMS and not any(isinstance(v, tuple) for v in value):
        for item in value:
            as_key(item)
        return value
    # Integers of any size would allow a dict in which all keys have one hash
    if value is None or isinstance(value, (str, bytes, float, Global, Inert)):
        return value
    if isinstance(value, int) and abs(value) < _MAX_INT_KEY:
        return value
    raise UnsafePickle(f'a {kind_of(value)} is used as a key')


def kind_of(value: Any) -> str:
    """What a value is, for a message; never its content, which may be endless."""
    return str(value)[:80] if isinstance(value, Global) else type(value).__name__
