"""Files that their owner writes from the first byte to the last, as an object store takes them.

What is sent comes before what is gathered, so a file has the one or the other. What is sent comes in the order of the
file, cut into consecutive elements. What is made together (``combine``) comes together, and waits for its turn in its
owner's memory: :func:`most_waiting_nbytes` says how much of it there ever is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xhf_hooks.planning.types import Group, OutputFile, Placement, Portion, SavePlan

#: Less than that at once is more rounds than bytes.
_LEAST_AT_ONCE_NBYTES = 4 * 2**20


def files_to_gather(groups: Sequence[Group], may_travel: Sequence[bool]) -> set[str]:
    """Files with anything that is gathered, and those that share a group with them."""
    found: set[str] = set()
    left = [{place.file for place in group.placements} for group in groups]
    gathered = [not may for may in may_travel]
    while any(gathered):
        before = len(found)
        for files in (files for files, is_gathered in zip(left, gathered, strict=True) if is_gathered):
            found |= files
        if len(found) == before:
            break
        gathered = [not found.isdisjoint(files) for files in left]
    return found


def in_file_order(portions: Iterable[Portion], files: Sequence[OutputFile]) -> list[Portion]:
    """File after file, each from its beginning."""
    number_of = {file.name: number for number, file in enumerate(files)}
    return sorted(portions, key=lambda portion: (number_of[portion.placement.file], portion.placement.offset))


def most_at_once(round_nbytes: int, portions: Sequence[Portion]) -> int:
    """What an owner gets at once: one rank may have all that all owners get next, and must hold it."""
    n_owners = len({portion.placement.owner for portion in portions}) or 1
    return min(round_nbytes, max(round_nbytes // n_owners, _LEAST_AT_ONCE_NBYTES))


def most_waiting_nbytes(plan: SavePlan, owner: int) -> int:
    """Bytes that wait at once in the owner's memory, at most, because something before them is not there yet."""
    position = {file.name: len(file.header) for file in plan.files}
    waiting: dict[tuple[str, int], Placement] = {}
    held = most = 0
    for group in plan.gathered:
        for place in (place for place in group.placements if place.owner == owner and place.nbytes):
            waiting[place.file, place.offset] = place
            held += place.nbytes
            while found := waiting.pop((place.file, position[place.file]), None):
                position[place.file] += found.nbytes
                held -= found.nbytes
            most = max(most, held)
    return most
