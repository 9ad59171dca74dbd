"""Plans which rank sends which elements to which owner, and when. Uses metadata alone, so all ranks plan the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from xhf_hooks.planning.types import Portion, Round


def fill_rounds(portions: Sequence[Portion], round_nbytes: int) -> tuple[Round, ...]:
    """Fill rounds in which no owner receives more than ``round_nbytes``, and every unfinished owner receives something.

    A larger portion is split within each rank's slice, so that every rank sends part of it in every round.
    """
    of_owner: dict[int, list[tuple[Portion, ...]]] = {}
    for owner in sorted({portion.placement.owner for portion in portions}):
        own = (portion for portion in portions if portion.placement.owner == owner)
        of_owner[owner] = list(_fill(own, round_nbytes))
    at_once = zip_longest(*of_owner.values(), fillvalue=())
    return tuple(Round(tuple(portion for some in each for portion in some)) for each in at_once)


def _fill(portions: Iterator[Portion], round_nbytes: int) -> Iterator[tuple[Portion, ...]]:
    filling: list[Portion] = []
    filled = 0
    for portion in portions:
        nbytes = portion.placement.nbytes
        if filling and filled + nbytes > round_nbytes:
            yield tuple(filling)
            filling, filled = [], 0
        count = -(-nbytes // round_nbytes)
        if count > 1:
            yield from ((replace(portion, number=number, count=count),) for number in range(count))
        else:
            filling.append(portion)
            filled += nbytes
    if filling:
        yield tuple(filling)
