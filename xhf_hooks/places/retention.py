"""Which saves stay when a newer one is committed: the same rule in a folder and in a store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from xhf_hooks.files.manifest import CommitRecord

Save = TypeVar('Save')


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

    def find_superfluous(self, saves: Iterable[tuple[Save, CommitRecord]]) -> list[Save]:
        """The saves to delete.

        Args:
            saves: Each save with what its manifest says of its commit, from the last commit to the first. The first
                one is of the training whose options these are.
        """
        ordered = list(saves)
        if self.max_keep == -1:
            return []
        # Of a training, keep_every and n: place of the first save from n * keep_every to (n + 1) * keep_every - 1
        first: dict[tuple[str, int, int], int] = {}
        for place, (_, commit) in enumerate(ordered):
            every, iteration = commit.keep_every, commit.step.iteration
            if commit.run == ordered[0][1].run:
                every = self.keep_every
            if every is None or iteration < every:
                continue
            multiple = (commit.run, every, iteration // every)
            # Of two saves of one iteration, which a resumed run makes, the one committed last stays
            if multiple not in first or iteration < ordered[first[multiple]][1].step.iteration:
                first[multiple] = place
        stays = {*range(self.max_keep), *first.values()}
        return [save for place, (save, _) in enumerate(ordered) if place not in stays]
