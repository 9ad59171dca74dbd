"""What ranks send each other: their slices of placements, round by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TypeVar

from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.planning.spread import Spread, on_one_rank
from xhf_hooks.planning.types import Group, Placement, TensorSpec

T = TypeVar('T')


@dataclass(frozen=True)
class Portion:
    """A placement with the elements that each rank holds of it: part ``number`` of ``count`` of them, for one round.

    Attributes:
        read: The source tensor that contains the output's elements.
        spread: Which elements of the placement each rank holds.
    """

    read: TensorSpec
    placement: Placement
    spread: Spread
    number: int = 0
    count: int = 1

    def held_by(self, rank: int) -> range:
        """The elements of the placement that a rank sends."""
        elements = self.spread.held_by(rank)
        if self.count == 1:
            return elements
        start, end = (elements.start + len(elements) * part // self.count for part in (self.number, self.number + 1))
        return range(start, end)

    def nbytes_of(self, rank: int) -> int:
        """Bytes that a rank sends, after the cast."""
        return len(self.held_by(rank)) * self.width

    @property
    def width(self) -> int:
        """Bytes per element in the file."""
        return DTYPE_NBYTES[self.placement.dtype]


@dataclass(frozen=True)
class Round:
    """Portions that are sent together, as one message from each rank to each owner.

    A message is the concatenation of what :meth:`message` lists.
    """

    portions: tuple[Portion, ...]

    @property
    def owners(self) -> list[int]:
        """The ranks that receive."""
        return sorted({portion.placement.owner for portion in self.portions})

    def for_owner(self, owner: int) -> list[Portion]:
        """The portions that an owner receives."""
        return [portion for portion in self.portions if portion.placement.owner == owner]

    def message(self, sender: int, owner: int) -> list[Portion]:
        """The portions in the message from a rank to an owner, in order."""
        return [portion for portion in self.for_owner(owner) if portion.held_by(sender)]

    def outgoing(self, sender: int) -> dict[int, int]:
        """Receiving rank to the bytes of the message that ``sender`` sends it."""
        nbytes: Counter[int] = Counter()
        for portion in self.portions:
            if portion.placement.owner != sender and portion.held_by(sender):
                nbytes[portion.placement.owner] += portion.nbytes_of(sender)
        return dict(nbytes)

    def arriving(self, owner: int) -> Iterator[tuple[int, Portion, range]]:
        """The elements that an owner receives from each rank, in the order of that rank's message."""
        for portion in self.for_owner(owner):
            for sender in portion.spread.holders:
                elements = portion.held_by(sender)
                if elements and sender != owner:
                    yield sender, portion, elements

    def incoming(self, owner: int) -> dict[int, int]:
        """Sending rank to the bytes of its message to ``owner``."""
        nbytes: Counter[int] = Counter()
        for sender, portion, elements in self.arriving(owner):
            nbytes[sender] += len(elements) * portion.width
        return dict(nbytes)

    def most_incoming_nbytes(self, owner: int) -> int:
        """An upper bound of the sum of :meth:`incoming`, computed without a loop over ranks."""
        most = 0
        for portion in self.for_owner(owner):
            rounded = len(portion.spread.holders) * portion.width if portion.count > 1 else 0
            most += -(-portion.placement.nbytes // portion.count) + rounded - portion.nbytes_of(owner)
        return most


def portions_of(group: Group) -> list[Portion]:
    """Each output of a group with the elements that each rank holds; none if it is gathered."""
    if group.spread is None:
        return []
    return [
        Portion(group.reads[0], placement, group.spread.within(placement.source_range))
        for placement in group.placements
    ]


def read_by_owner(portion: Portion, world_size: int) -> Portion:
    """A portion of which the owner holds everything."""
    return replace(portion, spread=on_one_rank(portion.spread.numel, portion.placement.owner, world_size))


def fill_rounds(portions: Iterable[Portion], round_nbytes: int) -> tuple[Round, ...]:
    """Fill rounds in which no owner receives more than ``round_nbytes``, and every unfinished owner receives something.

    A larger portion is split within each rank's slice, so that every rank sends part of it in every round.
    """
    parts: list[Portion] = []
    for portion in portions:
        count = max(1, -(-portion.placement.nbytes // round_nbytes))
        parts += [replace(portion, number=number, count=count) for number in range(count)]
    of_owners = [
        filled(own, lambda part: -(-part.placement.nbytes // part.count), round_nbytes)
        for own in by_owner(parts, lambda part: part.placement)
    ]
    return tuple(Round(tuple(chain.from_iterable(each))) for each in zip_longest(*of_owners, fillvalue=()))


def by_owner(items: Iterable[T], placement_of: Callable[[T], Placement]) -> list[list[T]]:
    """The items of each owner, in the order of owners."""
    of_owner: dict[int, list[T]] = {}
    for item in items:
        of_owner.setdefault(placement_of(item).owner, []).append(item)
    return [of_owner[owner] for owner in sorted(of_owner)]


def filled(items: Iterable[T], nbytes_of: Callable[[T], int], limit: int) -> Iterator[tuple[T, ...]]:
    """Consecutive items of up to ``limit`` bytes together; a larger one is alone."""
    filling: list[T] = []
    filled_nbytes = 0
    for item in items:
        nbytes = nbytes_of(item)
        if filling and filled_nbytes + nbytes > limit:
            yield tuple(filling)
            filling, filled_nbytes = [], 0
        filling.append(item)
        filled_nbytes += nbytes
    if filling:
        yield tuple(filling)
