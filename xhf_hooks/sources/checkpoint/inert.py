"""Passive stand-ins for what a pickle names: neither is anything imported, nor anything of the pickle called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xhf_hooks.errors import CheckpointError


class UnsafePickle(Exception):
    """The pickle is damaged, or was not written by torch.save."""


class Inert:
    """An object of a pickle, as data: its constructor and arguments.

    Attributes:
        args: Arguments of the constructor.
        state: The argument of ``__setstate__`` or update of ``__dict__``; None if there is none.
        items: Items appended to it.
        entries: Entries set on it.
    """

    __slots__ = ('args', 'entries', 'items', 'state')
    args: tuple[Any, ...]
    state: Any
    items: list[Any]
    entries: dict[Any, Any]

    def __new__(cls, *args: Any, **keywords: Any) -> Inert:
        made = super().__new__(cls)
        made.args, made.state, made.items, made.entries = args, keywords or None, [], {}
        return made

    # What pickle does with an object after making it

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self.items.extend(items)

    add = append

    @property
    def made_by(self) -> Global:
        """The constructor's name."""
        return type(self)  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f'<{self.made_by}>'  # the data may be huge

    def plain(self) -> Any:
        """A plain dict if it is a dict subclass, else a tuple of its attributes."""
        given = self.args[0] if len(self.args) == 1 else {}
        if isinstance(given, dict) and (given or self.entries):
            return {**given, **self.entries}
        return self.made_by, self.args, self.state, self.items, self.entries


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


_DEEPEST_DATA = 50


def as_data(value: Any, where: str) -> Any:
    """Copy a value of a pickle to a plain tree without shared containers, so that ``==`` takes linear time.

    Dict subclasses become plain dicts: MMEngine's ConfigDict is pickled as ``ConfigDict({...})`` (mmengine
    ``config/config.py``, ``__reduce_ex__``). Other objects become ``(class, args, state, items, entries)``: two
    :class:`Inert` are never equal. Sets, class names and tensors are kept.

    Args:
        where: File and field, for messages.

    Raises:
        CheckpointError: It contains itself, or is nested deeper than 50 levels.
    """

    def copy(value: Any, depth: int) -> Any:
        if depth > _DEEPEST_DATA:
            raise CheckpointError(
                f'{where}: nested deeper than {_DEEPEST_DATA} levels, or contains itself; take another checkpoint'
            )
        if isinstance(value, Inert):
            value = value.plain()
        if isinstance(value, dict):
            return {key: copy(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([copy(item, depth + 1) for item in value])
        return value

    return copy(value, 0)


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
