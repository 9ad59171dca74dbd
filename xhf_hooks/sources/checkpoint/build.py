"""Builds the objects of a pickle without calling anything: known types as plain values, others as :class:`Inert`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xhf_hooks.sources.checkpoint.inert import Global, Inert
from xhf_hooks.sources.checkpoint.limits import ENTRY_NBYTES, ITEM_NBYTES, Budget, Keys, UnsafePickle, kind_of
from xhf_hooks.sources.checkpoint.tensors import LazyTensor, make_tensor

_LONGEST_NAME = 1000
#: Memory of the result of any call, and the additional memory of these types.
_CALL_NBYTES, _GLOBAL_NBYTES, _INERT_NBYTES, _TENSOR_NBYTES = 150, 250, 250, 250
_DIM_NBYTES = 20
_TENSORS = ('_rebuild_tensor', '_rebuild_tensor_v2', '_rebuild_tensor_v3')
_PARAMETERS = ('_rebuild_parameter', '_rebuild_parameter_with_state')
_DICTS = (Global('collections', 'OrderedDict'), Global('collections', 'defaultdict'))
_SIZE = Global('torch', 'Size')
_CONTAINERS = {'set': set, 'frozenset': frozenset, 'list': list, 'tuple': tuple}
_BUILTINS = ('builtins', '__builtin__')


class Builder:
    """Builds values from the names of their constructors, which are compared, never imported or called.

    Args:
        budget: Memory limit: a pickle that refers to one list many times needs more than its own size.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._keys = Keys()

    def name(self, module: str, name: str) -> Global:
        """The placeholder of an importable object."""
        self._budget.spend(_GLOBAL_NBYTES)
        if len(module) + len(name) > _LONGEST_NAME:
            raise UnsafePickle(f'a name of {len(module) + len(name)} characters; expected at most {_LONGEST_NAME}')
        return Global(module, name)

    def make(self, function: Any, args: Any) -> Any:
        """The result of calling ``function``, without calling it."""
        self._budget.spend(_CALL_NBYTES)
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise UnsafePickle(f'a {kind_of(function)} is called with a {kind_of(args)}')
        state = None
        if function.module == 'torch._tensor' and function.name == '_rebuild_from_type_v2' and len(args) == 4:
            function, _, args, state = args  # a tensor with Python attributes, or of a subclass
            if not isinstance(function, Global) or not isinstance(args, tuple):
                raise UnsafePickle(f'a tensor is rebuilt by a {kind_of(function)}')
        if function.module == 'torch._utils':
            if function.name in _TENSORS:
                self._budget.spend(_TENSOR_NBYTES + sum(_DIM_NBYTES * len(a) for a in args if isinstance(a, tuple)))
                return make_tensor(function.name, args)
            if function.name in _PARAMETERS and args and isinstance(args[0], LazyTensor):
                return args[0]
        if function in _DICTS:
            return self._ordered_dict(args if function.name == 'OrderedDict' else args[1:])
        if function == _SIZE and len(args) == 1 and isinstance(args[0], (tuple, list)):
            return self._copy(tuple, args[0])
        if function.module in _BUILTINS:
            return self._builtin(function, args)
        return self._inert(function, args, state)

    def add(self, target: set[Any], values: Any) -> None:
        """Add checked members to a set."""
        self._budget.spend(ENTRY_NBYTES * len(values))
        for value in values:
            self._keys.check(value, len(target))
            target.add(value)

    def fill(self, target: dict[Any, Any], pairs: Iterable[tuple[Any, Any]], n_pairs: int) -> None:
        """Set entries under checked keys."""
        self._budget.spend(ENTRY_NBYTES * n_pairs)
        for key, value in pairs:
            self._keys.check(key, len(target))
            target[key] = value

    def _builtin(self, function: Global, args: tuple[Any, ...]) -> Any:
        plain = _CONTAINERS.get(function.name)
        if plain and len(args) <= 1 and all(isinstance(a, (list, tuple, set, frozenset)) for a in args):
            items = args[0] if args else ()
            if plain in (set, frozenset):
                members: set[Any] = set()
                self.add(members, items)
                return members if plain is set else frozenset(members)
            return self._copy(plain, items)
        if function.name == 'dict' and not args:
            return {}
        if function.name == 'getattr' and len(args) == 2 and isinstance(args[0], Global) and type(args[1]) is str:
            return self.name(args[0].module, f'{args[0].name}.{args[1]}')  # an enum member
        return self._inert(function, args)

    def _inert(self, function: Global, args: tuple[Any, ...], state: Any = None) -> Inert:
        self._budget.spend(_INERT_NBYTES)
        made = Inert(function, args)
        made.state = state
        return made

    def _ordered_dict(self, args: tuple[Any, ...]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        if args:
            self.fill(made, args[0].items() if isinstance(args[0], dict) else args[0], len(args[0]))
        return made

    def _copy(self, kind: type, items: Any) -> Any:
        self._budget.spend(ITEM_NBYTES * len(items))
        return kind(items)
