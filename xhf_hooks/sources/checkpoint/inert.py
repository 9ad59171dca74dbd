"""What stands for the objects of a pickle that are neither plain data nor tensors. None of it does anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xhf_hooks.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle gives for an importable object. Nothing is imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f'{self.module}.{self.name}'


class Inert:
    """An object that a pickle would have made, as data: what was to be called, and what it was to be given.

    Attributes:
        made_by: The name that would have been called.
        args: Its arguments.
        state: What would have been given to ``__setstate__`` or put into ``__dict__``; None if nothing.
        items: What would have been appended to it.
        entries: What would have been set on it as on a dict.
    """

    __slots__ = ('args', 'entries', 'items', 'made_by', 'state')

    def __init__(self, made_by: Global, args: tuple[Any, ...]) -> None:
        self.made_by = made_by
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []
        self.entries: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f'<{self.made_by}>'  # the data may be endless

    def plain(self) -> Any:
        """The dict that it is a copy of, else a tuple of its attributes."""
        given = self.args[0] if len(self.args) == 1 else {}
        if isinstance(given, dict) and (given or self.entries):
            return {**given, **self.entries}
        return self.made_by, self.args, self.state, self.items, self.entries


_DEEPEST_DATA = 50
#: In a file of 100,000 parameters, their shapes are some 500,000.
_MOST_DATA = 2_000_000
_NUMBER_KEY_PARTS = 30  # a file can make copies of a dict slow with numbers as keys (see limits.py)


def as_data(value: Any, where: str) -> Any:
    """A value of a pickle as a plain tree: no container is in it twice, so that walks and ``==`` take linear time.

    A pickle may name one list again and again, or put it into itself; each mention becomes a copy. Dicts of a class
    of their own, as MMEngine's ConfigDict, become plain dicts: ConfigDict is pickled as ``ConfigDict({...})``
    (mmengine ``config/config.py``, ``__reduce_ex__``). Other objects become ``(class, args, state, items, entries)``,
    since two :class:`Inert` are never equal. Sets, names of classes and tensors stay as they are: a set holds keys.

    Args:
        where: File and field, for the message.

    Raises:
        CheckpointError: It holds itself, is nested deeper than 50 levels, or has more than 2 million parts.
    """
    left = _MOST_DATA

    def copy(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise CheckpointError(f'{where}: has more than {_MOST_DATA} parts; take another checkpoint')
        if depth > _DEEPEST_DATA:
            raise CheckpointError(
                f'{where}: is nested deeper than {_DEEPEST_DATA} levels, or holds itself; take another checkpoint'
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
    """The number behind an int of at most 64 bits or an enum member; None for anything else.

    Enum members are pickled as ``Class(value)``, by Python 3.11 as ``getattr(Class, 'member')``.
    """
    if isinstance(value, Inert) and len(value.args) == 1 and value.made_by.name == 'ZeroStageEnum':
        value = value.args[0]
    if isinstance(value, Global):
        owner, _, member = value.name.rpartition('.')
        return _ZERO_STAGES.get(member) if owner == 'ZeroStageEnum' else None
    return value if type(value) is int and -(2**63) <= value < 2**63 else None
