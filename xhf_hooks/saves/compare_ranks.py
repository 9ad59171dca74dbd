"""Checks that all ranks have made the same plan."""

from __future__ import annotations

from collections.abc import Callable

from xhf_hooks.collective import Collective
from xhf_hooks.errors import RanksDifferError
from xhf_hooks.format.checksum import first_difference, line_checksums


def require_same(collective: Collective, what: str, digest: str, describe: Callable[[], list[str]]) -> None:
    """Check that all ranks hold the same thing. Runs on: all ranks.

    Args:
        what: Names the thing, for the message.
        digest: Compared first, so that nothing large is sent if the digests are equal.
        describe: Returns the thing as lines; called only to find the first difference.

    Raises:
        RanksDifferError: The thing differs; the message names both sides.
        AgreedError: A rank failed.
    """
    collective.raise_if_any_failed(what)  # a rank that fails before this line votes next
    if not collective.any(digest != collective.broadcast(digest)):
        return
    # Of many lines on very many ranks, nothing but checksums of rank 0's lines and one line of each side travel
    lines: list[str] = []
    with collective.stage(what):
        lines = describe()
    theirs = collective.broadcast(line_checksums(lines))
    found, line = -1, ''
    with collective.stage(what):
        found = first_difference(theirs, line_checksums(lines))
    firsts = collective.all_gather(found)
    odd = [rank for rank, number in enumerate(firsts) if number >= 0]
    if not odd:
        raise RanksDifferError(f'{what} differs between ranks, but not in a line that describes it')
    first = firsts[odd[0]]
    if collective.rank in (0, odd[0]):
        line = repr(lines[first]) if first < len(lines) else 'nothing more'
    sides = collective.all_gather(line)
    raise RanksDifferError(
        f'{what} differs between ranks 0 and {odd}: line {first} is {sides[0]} on rank 0 and '
        f'{sides[odd[0]]} on rank {odd[0]}. All ranks must hold the same model.'
    )
