"""What reading a pickle may cost, in bytes of objects, and which keys it may use."""

from __future__ import annotations

from typing import Any

from xhf_hooks.sources.checkpoint.inert import Global, Inert

#: Of objects that one file makes. 100,000 parameters with the state of Adam need some 600 million.
MOST_NBYTES = 1_500_000_000
ENTRY_NBYTES = 100  # of a dict or set, which grow by leaps
ITEM_NBYTES = 9  # of a list or tuple

_MOST_KEY_ITEMS = 16
_LARGEST_INT_KEY = 2**60
_SMALL = 100  # entries, among which equal hashes cost nothing
_MOST_TUPLES, _MOST_ODD_NUMBERS = 5_000, 30_000


class UnsafePickle(Exception):
    """A pickle that is damaged, absurd, or not of the kind that torch.save writes."""


class Budget:
    """Bytes that may still be spent on objects. What takes time costs bytes, too, so that it also bounds the time."""

    def __init__(self, nbytes: int = MOST_NBYTES) -> None:
        self.left = self._nbytes = nbytes

    def spend(self, nbytes: int) -> None:
        """Take them.

        Raises:
            UnsafePickle: There are not so many left.
        """
        self.left -= nbytes
        if self.left < 0:
            raise self.exceeded()

    def exceeded(self) -> UnsafePickle:
        return UnsafePickle(f'makes more than {self._nbytes / 1e6:g} MB of objects')


class Keys:
    """Lets pass keys of dicts and members of sets with which no dict can be made slow.

    Python's hashes of numbers and tuples are known to everybody: a file could hold keys that all collide, and 200,000
    of them take minutes. Those of text and bytes are secret. Numbers counted from 0 on never collide; all others,
    and tuples, may be few. Real files count the optimizer's states, and use text else.
    """

    def __init__(self) -> None:
        self._tuples_left, self._odd_numbers_left = _MOST_TUPLES, _MOST_ODD_NUMBERS

    def check(self, key: Any, n_before: int) -> None:
        """Check one key.

        Args:
            n_before: Entries that the dict or set has already.

        Raises:
            UnsafePickle: It cannot be hashed, in little time and depth, or there are too many of its kind.
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
    """What a value is, for a message; never its content, which may be endless."""
    return f'{str(value)[:80]!a}' if isinstance(value, Global) else type(value).__name__
