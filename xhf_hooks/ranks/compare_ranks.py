"""Checks that all ranks have made the same plan."""

from __future__ import annotations

from collections.abc import Callable

from xhf_hooks.errors import RanksDifferError
from xhf_hooks.format.checksum import first_difference, line_checksums
from xhf_hooks.ranks.collective import Collective


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
    expected_digest = collective.from_rank0(what, lambda: digest)
    if not collective.vote_any(digest != expected_digest, what):
        return
    # Of many lines on very many ranks, nothing but checksums of rank 0's lines and one line of each side travel
    with collective.stage(what):
        lines = describe()
        checksums = line_checksums(lines)
    expected = collective.from_rank0(what, lambda: checksums)
    firsts = collective.from_all_ranks(what, lambda: first_difference(expected, checksums))
    odd = [rank for rank, number in enumerate(firsts) if number >= 0]
    if not odd:
        raise RanksDifferError(f'{what} differs between ranks, but not in a line that describes it')
    first = firsts[odd[0]]

    def line_to_name() -> str:
        if collective.rank not in (0, odd[0]):
            return ''
        return repr(lines[first]) if first < len(lines) else 'nothing more'

    sides = collective.from_all_ranks(what, line_to_name)
    raise RanksDifferError(
        f'{what} differs between ranks 0 and {odd}: line {first} is {sides[0]} on rank 0 and '
        f'{sides[odd[0]]} on rank {odd[0]}. All ranks must hold the same model.'
    )
