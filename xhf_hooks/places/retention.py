"""Which saves stay when a newer one is committed: the same rule in a folder and in a store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

Save = TypeVar('Save')


@dataclass(frozen=True)
class Retention:
    """The newest saves stay. With ``keep_every``, the first at or after each multiple of it stays for good, too.

    Attributes:
        max_keep: How many of the newest saves stay; -1 keeps all.
        keep_every: For each multiple of this number of iterations, the first save at or after it is kept for good,
            besides the newest ones (saves that a clock or a signal asked for rarely hit a multiple); None: only the
            newest ones stay.
    """

    max_keep: int
    keep_every: int | None = None

    def find_superfluous(self, saves: Iterable[tuple[Save, int]]) -> list[Save]:
        """The saves to delete.

        Args:
            saves: Each save with its number of iterations, from the last commit to the first.
        """
        ordered = list(saves)
        if self.max_keep == -1:
            return []
        first: dict[int, int] = {}  # n: place of the first save before (n + 1) * keep_every, and from n * keep_every on
        for place, (_, iteration) in enumerate(ordered if self.keep_every is not None else ()):
            multiple = iteration // (self.keep_every or 1)
            # Of two saves of one iteration, which a resumed run makes, the one committed last stays
            if multiple > 0 and (multiple not in first or iteration < ordered[first[multiple]][1]):
                first[multiple] = place
        stays = {*range(self.max_keep), *first.values()}
        return [save for place, (save, _) in enumerate(ordered) if place not in stays]
