"""Plans which rank sends which elements to which owner, and when. Uses metadata alone, so all ranks plan the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from xhf_hooks.planning.types import Portion, Round


def fill_rounds(portions: Sequence[Portion], round_nbytes: int, *, in_order: bool = False) -> tuple[Round, ...]:
    """Fill rounds in which no owner receives more than ``round_nbytes``, and every unfinished owner receives something.

    A larger portion is split within each rank's slice, so that every rank sends part of it in every round.

    Args:
        in_order: Split it into consecutive elements instead, for owners that cannot seek.
    """
    of_owner: dict[int, list[tuple[Portion, ...]]] = {}
    for owner in sorted({portion.placement.owner for portion in portions}):
        own = (portion for portion in portions if portion.placement.owner == owner)
        of_owner[owner] = list(_fill(own, round_nbytes, _runs if in_order else _parts))
    at_once = zip_longest(*of_owner.values(), fillvalue=())
    return tuple(Round(tuple(portion for some in each for portion in some)) for each in at_once)


def _parts(portion: Portion, count: int) -> Iterator[Portion]:
    return (replace(portion, number=number, count=count) for number in range(count))


def _runs(portion: Portion, count: int) -> Iterator[Portion]:
    numel = portion.spread.numel
    ends = [numel * number // count for number in range(count + 1)]
    for number, (start, end) in enumerate(pairwise(ends)):
        yield replace(portion, number=number, count=count, run=range(start, end))


def _fill(
    portions: Iterator[Portion], round_nbytes: int, cut: Callable[[Portion, int], Iterator[Portion]]
) -> Iterator[tuple[Portion, ...]]:
    filling: list[Portion] = []
    filled = 0
    for portion in portions:
        nbytes = portion.placement.nbytes
        if filling and filled + nbytes > round_nbytes:
            yield tuple(filling)
            filling, filled = [], 0
        count = -(-nbytes // round_nbytes)
        if count > 1:
            yield from ((part,) for part in cut(portion, count))
        else:
            filling.append(portion)
            filled += nbytes
    if filling:
        yield tuple(filling)
