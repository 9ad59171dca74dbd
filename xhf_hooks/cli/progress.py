"""Progress of a long command: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from typing import Any

from xhf_hooks.format.text import size_text


class Progress:
    """Shows progress when called with the bytes done and the total. A context manager, which closes the bar.

    Args:
        label: A word such as ``'converting'``.
        line_every_secs: Seconds between lines without a terminal.
    """

    def __init__(self, label: str, line_every_secs: float = 10.0) -> None:
        self._label, self._line_every_secs = label, line_every_secs
        self._bar: Any | None = None
        self._told, self._done_then = time.monotonic(), 0

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            self._draw(done, total)
        elif time.monotonic() - self._told >= self._line_every_secs:
            self._tell(done, total)

    def _tell(self, done: int, total: int) -> None:
        now = time.monotonic()
        rate = (done - self._done_then) / max(now - self._told, 1e-9)  # the recent rate, since holes take no time
        self._told, self._done_then = now, done
        left = f'{duration_text((total - done) / rate)} left' if rate > 0 else 'waiting for the disk'
        share = 100 * done // max(total, 1)
        print(
            f'{self._label}: {share} % of {size_text(total)}, {size_text(int(rate))}/s, {left}',
            file=sys.stderr,
            flush=True,
        )

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=self._label, unit='B', unit_scale=True, leave=False)
        self._bar.update(done - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def duration_text(secs: float) -> str:
    """Such as ``'40 s'``, ``'12 min'`` or ``'3 h 20 min'``."""
    if secs < 99.5:
        return f'{secs:.0f} s'
    minutes = round(secs / 60)
    return f'{minutes} min' if minutes < 100 else f'{minutes // 60} h {minutes % 60} min'
