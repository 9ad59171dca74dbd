"""Which rank sends which elements of which tensor to whom, and when: from metadata alone, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from xhf_hooks.planning.types import Portion, Round


def fill_rounds(portions: Sequence[Portion], round_nbytes: int, *, in_order: bool = False) -> tuple[Round, ...]:
    """Rounds in which no owner gets more than ``round_nbytes``, and each gets something while there is any for it.

    What is larger is cut, each rank's slice of it; so every rank sends something of it all the time.

    Args:
        in_order: Cut it into consecutive elements instead, as an owner must get it that cannot seek.
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
