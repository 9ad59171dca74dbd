"""Passive placeholders for objects of a pickle that are neither plain data nor tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xhf_hooks.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Global:
    """The name of an importable object in a pickle. It is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f'{self.module}.{self.name}'


class Inert:
    """An object of a pickle, as data: its constructor and arguments.

    Attributes:
        made_by: The constructor's name.
        args: Its arguments.
        state: The argument of ``__setstate__`` or update of ``__dict__``; None if there is none.
        items: Items appended to it.
        entries: Entries set on it.
    """

    __slots__ = ('args', 'entries', 'items', 'made_by', 'state')

    def __init__(self, made_by: Global, args: tuple[Any, ...]) -> None:
        self.made_by = made_by
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []
        self.entries: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f'<{self.made_by}>'  # the data may be huge

    def plain(self) -> Any:
        """A plain dict if it is a dict subclass, else a tuple of its attributes."""
        given = self.args[0] if len(self.args) == 1 else {}
        if isinstance(given, dict) and (given or self.entries):
            return {**given, **self.entries}
        return self.made_by, self.args, self.state, self.items, self.entries


_DEEPEST_DATA = 50
#: A file of 100,000 parameters has about 500,000, with their shapes.
_MOST_DATA = 2_000_000
_NUMBER_KEY_PARTS = 30  # extra parts per number key: their hashes may collide (see limits.py)


def as_data(value: Any, where: str) -> Any:
    """Copy a value of a pickle to a plain tree without shared containers, so that ``==`` takes linear time.

    A pickle may refer to one list many times, or put it into itself; each reference becomes a copy. Dict subclasses
    become plain dicts: MMEngine's ConfigDict is pickled as ``ConfigDict({...})`` (mmengine ``config/config.py``,
    ``__reduce_ex__``). Other objects become ``(class, args, state, items, entries)``: two :class:`Inert` are never
    equal. Sets, class names and tensors are kept.

    Args:
        where: File and field, for messages.

    Raises:
        CheckpointError: It contains itself, is nested deeper than 50 levels, or has more than 2 million parts.
    """
    left = _MOST_DATA

    def copy(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise CheckpointError(f'{where}: has more than {_MOST_DATA} parts; take another checkpoint')
        if depth > _DEEPEST_DATA:
            raise CheckpointError(
                f'{where}: nested deeper than {_DEEPEST_DATA} levels, or contains itself; take another checkpoint'
            )
        if isinstance(value, Inert):
            value = value.plain()
        if isinstance(value, dict):
            left -= _NUMBER_KEY_PARTS * sum(type(key) is not str for key in value)
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
