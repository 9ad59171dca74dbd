"""What stands for the objects of a pickle that are neither plain data nor tensors. None of it does anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
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


_DEEPEST_DATA = 20


def as_data(value: Any, depth: int = 0) -> Any:
    """Dicts of a class of their own, as MMEngine's ConfigDict, as plain dicts; all else as it is.

    ConfigDict is pickled as ``ConfigDict({...})`` (mmengine ``config/config.py``, ``__reduce_ex__``).
    """
    if depth > _DEEPEST_DATA:  # it may hold itself
        return value
    if isinstance(value, Inert):
        given = value.args[0] if len(value.args) == 1 else {}
        if not isinstance(given, dict) or not (given or value.entries):
            return value
        value = {**given, **value.entries}
    if isinstance(value, dict):
        return {key: as_data(item, depth + 1) for key, item in value.items()}
    return value


#: Members of DeepSpeed's ZeroStageEnum, for pickles of Python 3.11, which store members by name.
_ZERO_STAGES = {'disabled': 0, 'optimizer_states': 1, 'gradients': 2, 'weights': 3}


def as_int(value: Any) -> int | None:
    """The number behind an int or an enum member; None for anything else.

    Enum members are pickled as ``Class(value)``, by Python 3.11 as ``getattr(Class, 'member')``.
    """
    if isinstance(value, Inert) and len(value.args) == 1 and value.made_by.name == 'ZeroStageEnum':
        value = value.args[0]
    if isinstance(value, Global):
        owner, _, member = value.name.rpartition('.')
        return _ZERO_STAGES.get(member) if owner == 'ZeroStageEnum' else None
    return value if type(value) is int else None
