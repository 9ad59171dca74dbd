"""Which rank sends which elements of which tensor to whom, and when: from metadata alone, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.planning.types import Placement, TensorSpec


@dataclass(frozen=True)
class Spread:
    """Which elements of a tensor each rank has: consecutive ones, rank 0 the first.

    Every engine cuts something flat into equal parts: a parameter (ZeRO-3), rows (FSDP2), or a flat buffer in which
    the tensor is one of many (FSDP1, the fp32 masters of ZeRO 1 and 2).

    Attributes:
        numel: Elements of the tensor.
        each: Elements of what is cut that a rank has.
        skipped: Elements of what is cut that lie before this tensor.
    """

    numel: int
    each: int
    skipped: int = 0

    def held_by(self, rank: int) -> range:
        """The elements of the tensor that a rank has."""
        first = rank * self.each - self.skipped
        start, end = (min(max(0, at), self.numel) for at in (first, first + self.each))
        return range(start, end)

    @property
    def holders(self) -> range:
        """The ranks that have any."""
        if not self.numel:
            return range(0)
        return range(self.skipped // self.each, -(-(self.skipped + self.numel) // self.each))

    def within(self, start: int, numel: int) -> Spread:
        """That of a run of its elements, counted from the beginning of the run."""
        return Spread(numel, self.each, self.skipped + start)


@dataclass(frozen=True)
class Portion:
    """What travels to the owner of an output tensor at once: of each rank's elements, part ``number`` of ``count``.

    Attributes:
        read: What the tensor is a run of elements of.
        spread: Of the elements of the placement.
    """

    read: TensorSpec
    placement: Placement
    spread: Spread
    number: int = 0
    count: int = 1

    def held_by(self, rank: int) -> range:
        """The elements of the placement that come from a rank."""
        held = self.spread.held_by(rank)
        start, end = (held.start + len(held) * part // self.count for part in (self.number, self.number + 1))
        return range(start, end)

    def nbytes_of(self, rank: int) -> int:
        """How many bytes come from a rank, cast."""
        return len(self.held_by(rank)) * self.width

    @property
    def width(self) -> int:
        """Bytes of an element in the file."""
        return DTYPE_NBYTES[self.placement.dtype]


@dataclass(frozen=True)
class Round:
    """Portions that travel at once: from each rank one message to each owner.

    A message is what :meth:`message` lists, one after the other.
    """

    portions: tuple[Portion, ...]

    @property
    def owners(self) -> list[int]:
        """The ranks that receive."""
        return sorted({portion.placement.owner for portion in self.portions})

    def for_owner(self, owner: int) -> list[Portion]:
        """What an owner gets."""
        return [portion for portion in self.portions if portion.placement.owner == owner]

    def message(self, sender: int, owner: int) -> list[Portion]:
        """Portions of which a rank sends something to an owner, in their order in the message."""
        return [portion for portion in self.for_owner(owner) if portion.held_by(sender)]

    def outgoing(self, sender: int) -> dict[int, int]:
        """Bytes of the message from a rank to each other rank that gets one."""
        nbytes: dict[int, int] = {}
        for portion in self.portions:
            owner, found = portion.placement.owner, portion.nbytes_of(sender)
            if owner != sender and found:
                nbytes[owner] = nbytes.get(owner, 0) + found
        return nbytes

    def incoming(self, owner: int) -> dict[int, int]:
        """Bytes of the message to a rank from each other rank that sends one."""
        nbytes: dict[int, int] = {}
        for portion in self.for_owner(owner):
            for sender in portion.spread.holders:
                found = portion.nbytes_of(sender)
                if sender != owner and found:
                    nbytes[sender] = nbytes.get(sender, 0) + found
        return nbytes

    def most_incoming_nbytes(self, owner: int) -> int:
        """No less than all of these together, without a look at each rank."""
        found = 0
        for portion in self.for_owner(owner):
            rounded = len(portion.spread.holders) * portion.width if portion.count > 1 else 0
            found += -(-portion.placement.nbytes // portion.count) + rounded - portion.nbytes_of(owner)
        return found


def fill_rounds(portions: Sequence[Portion], round_nbytes: int) -> tuple[Round, ...]:
    """Rounds in which no owner gets more than ``round_nbytes``, and each gets something while there is any for it.

    What is larger is cut, each rank's slice of it.
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
