"""Plans files that their owner writes from the first byte to the last, as object stores require.

All sent tensors arrive before any gathered one, so a file holds only sent or only gathered tensors. Sent tensors arrive
in file order, as consecutive elements. Tensors made by one ``combine`` arrive together, and wait in the owner's memory
until the file gets to them; :func:`most_waiting_nbytes` bounds how much waits at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xhf_hooks.planning.types import Group, OutputFile, Placement, Portion, SavePlan

#: Smaller rounds would cost more in round trips than they save in memory.
_LEAST_AT_ONCE_NBYTES = 4 * 2**20


def files_to_gather(groups: Sequence[Group], may_travel: Sequence[bool]) -> set[str]:
    """Files that hold a gathered tensor, and files that share a group with such a file."""
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
    """Portions sorted by file, and within each file by offset."""
    number_of = {file.name: number for number, file in enumerate(files)}
    return sorted(portions, key=lambda portion: (number_of[portion.placement.file], portion.placement.offset))


def most_at_once(round_nbytes: int, portions: Sequence[Portion]) -> int:
    """Bytes that an owner may receive per round, small enough for one rank that sends to all owners at once."""
    n_owners = len({portion.placement.owner for portion in portions}) or 1
    return min(round_nbytes, max(round_nbytes // n_owners, _LEAST_AT_ONCE_NBYTES))


def most_waiting_nbytes(plan: SavePlan, owner: int) -> int:
    """Most bytes that ever wait in the owner's memory because bytes before them have not arrived."""
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
