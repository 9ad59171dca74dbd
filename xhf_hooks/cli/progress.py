"""How far a long command is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

_LINE_EVERY_SECS = 10.0


class Progress:
    """Called with bytes done and bytes in all; a context manager, which ends the bar's line."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Any | None = None
        self._last = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            self._draw(done, total)
        elif time.monotonic() - self._last >= _LINE_EVERY_SECS:
            self._last = time.monotonic()
            print(f'{self._label}: {done / 1e9:.2f} of {total / 1e9:.2f} GB', file=sys.stderr, flush=True)

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=self._label, unit='B', unit_scale=True, leave=False)
        self._bar.update(done - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
