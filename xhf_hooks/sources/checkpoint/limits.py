"""Limits on the memory of a pickle's objects, and on the keys of its dicts."""

from __future__ import annotations

from typing import Any

from xhf_hooks.sources.checkpoint.inert import Global, Inert

#: Memory of one file's objects. 100,000 parameters with the state of Adam need about 600 MB.
MOST_NBYTES = 1_500_000_000
ENTRY_NBYTES = 100  # of a dict or set
ITEM_NBYTES = 9  # of a list or tuple

_MOST_KEY_ITEMS = 16
_LARGEST_INT_KEY = 2**60
_SMALL = 100  # entries; hash collisions among so few cost nothing
_MOST_TUPLES, _MOST_ODD_NUMBERS = 5_000, 30_000


class UnsafePickle(Exception):
    """The pickle is damaged, exceeds a limit, or was not written by torch.save."""


class Budget:
    """A limit on the memory of objects. Every instruction costs some bytes, so it also limits the time."""

    def __init__(self, nbytes: int = MOST_NBYTES) -> None:
        self.left = self._nbytes = nbytes

    def spend(self, nbytes: int) -> None:
        """Subtract from the budget.

        Raises:
            UnsafePickle: It is exceeded.
        """
        self.left -= nbytes
        if self.left < 0:
            raise self.exceeded()

    def exceeded(self) -> UnsafePickle:
        return UnsafePickle(f'its objects need more than {self._nbytes / 1e6:g} MB')


class Keys:
    """Refuses keys of dicts and sets that could be constructed to collide.

    Python's hashes of numbers and tuples are predictable: a file could hold 200,000 colliding keys, which take minutes.
    Hashes of str and bytes are randomized. Consecutive numbers from 0 do not collide; other numbers, and tuples, are
    limited. Valid files number the optimizer's states and use str otherwise.
    """

    def __init__(self) -> None:
        self._tuples_left, self._odd_numbers_left = _MOST_TUPLES, _MOST_ODD_NUMBERS

    def check(self, key: Any, n_before: int) -> None:
        """Check one key.

        Args:
            n_before: Number of entries in the dict or set.

        Raises:
            UnsafePickle: The key is unhashable or expensive to hash, or there are too many of its kind.
        """
        kind = type(key)
        if kind is str or kind is bytes or key is None or kind is bool or kind is Global or kind is Inert:
            return
        if kind is tuple:
            self._check_tuple(key)
        elif kind is float or kind is int:
            if kind is int and abs(key) >= _LARGEST_INT_KEY:
                raise UnsafePickle('an integer beyond 2**60 is used as a key')
            if n_before < _SMALL or (kind is int and 0 <= key <= n_before + _SMALL):
                return
            self._odd_numbers_left -= 1
            if self._odd_numbers_left < 0:
                raise UnsafePickle(f'more than {_MOST_ODD_NUMBERS} numbers out of order are used as keys')
        else:
            raise UnsafePickle(f'a {kind_of(key)} is used as a key')

    def _check_tuple(self, key: tuple[Any, ...]) -> None:
        self._tuples_left -= 1
        if self._tuples_left < 0:
            raise UnsafePickle(f'more than {_MOST_TUPLES} tuples are used as keys')
        if len(key) > _MOST_KEY_ITEMS:
            raise UnsafePickle(f'a tuple of {len(key)} items is used as a key')
        for item in key:
            if type(item) is tuple:
                raise UnsafePickle('a tuple of tuples is used as a key')
            self.check(item, 0)


def kind_of(value: Any) -> str:
    """The type of a value, for messages, which never show its content: it may be huge."""
    return f'{str(value)[:80]!a}' if isinstance(value, Global) else type(value).__name__
