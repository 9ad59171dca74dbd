"""Keeps transformers from logging."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the block, transformers logs nothing: its log lines quote the files, and failures are raised anyway."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.set_verbosity(before)
