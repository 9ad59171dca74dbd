"""Runs what is measured in turns, and tells how much of it is done and how long the rest will take."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence

Figures = dict[str, float]


def in_turns(
    ways: Sequence[str], repeats: int, measure: Callable[[str], Figures], tell: Callable[[str], None]
) -> dict[str, list[Figures]]:
    """Measure each way several times, in random order, so that no way always follows the same other one.

    Args:
        tell: Called after each run with one line of text.

    Returns:
        What was measured, by way.
    """
    order = random.Random(0)
    turns = [way for _ in range(repeats) for way in order.sample(list(ways), len(ways))]
    runs: dict[str, list[Figures]] = {way: [] for way in ways}
    began = time.perf_counter()
    for n_done, way in enumerate(turns, 1):
        found = measure(way)
        runs[way].append(found)
        left = (time.perf_counter() - began) / n_done * (len(turns) - n_done)
        seconds = found.get('seconds', found.get('save_secs', 0.0))
        tell(f'[{n_done}/{len(turns)}] {way}: {seconds:.2f} s; about {left / 60:.0f} min left')
    return runs


def tell_on_stderr(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)
