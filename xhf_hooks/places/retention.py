"""Which saves stay when a newer one is committed: the same rule in a folder and in a store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

Save = TypeVar('Save')


class Origin(NamedTuple):
    """What decides whether a save stays.

    Attributes:
        iteration: Iterations done at the save.
        run: Identifies the training that made it; a resumed run goes on with the training of the run before it.
        keep_every: That option of the run.
    """

    iteration: int
    run: str = ''
    keep_every: int | None = None


@dataclass(frozen=True)
class Retention:
    """The newest saves stay. With ``keep_every``, the first at or after each multiple of it stays for good, too.

    Each training keeps its own saves for good, whatever other trainings save into the same folder.

    Attributes:
        max_keep: How many of the newest saves stay; -1 keeps all.
        keep_every: For each multiple of this number of iterations, the first save at or after it is kept for good,
            besides the newest ones (saves that a clock or a signal asked for rarely hit a multiple); None: only the
            newest ones stay.
    """

    max_keep: int
    keep_every: int | None = None

    def find_superfluous(self, saves: Iterable[tuple[Save, Origin]]) -> list[Save]:
        """The saves to delete.

        Args:
            saves: Each save with its origin, from the last commit to the first. The first one is of the training whose
                options these are.
        """
        ordered = list(saves)
        if self.max_keep == -1:
            return []
        # Of a training, keep_every and n: place of the first save from n * keep_every to (n + 1) * keep_every - 1
        first: dict[tuple[str, int, int], int] = {}
        for place, (_, origin) in enumerate(ordered):
            every = self.keep_every if origin.run == ordered[0][1].run else origin.keep_every
            if every is None or origin.iteration < every:
                continue
            multiple = (origin.run, every, origin.iteration // every)
            # Of two saves of one iteration, which a resumed run makes, the one committed last stays
            if multiple not in first or origin.iteration < ordered[first[multiple]][1].iteration:
                first[multiple] = place
        stays = {*range(self.max_keep), *first.values()}
        return [save for place, (save, _) in enumerate(ordered) if place not in stays]
