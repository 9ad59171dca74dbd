"""Settings of Python, torch and transformers that are changed inside a block."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Pause the collector of reference cycles, where very many objects are made and hardly any cycle becomes garbage.

    It looks through new objects whenever there are some hundreds of them, and through older ones now and then. Of the
    time to plan saves of 45,000 tensors, that was a third.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limit torch to one thread, where worker threads provide the parallelism."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers: its log lines quote the files, and failures are raised anyway."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def as_the_only_process() -> Iterator[None]:
    """To code that asks torch.distributed in this thread, there is one process, without a process group.

    Code that runs on one rank alone, or on each rank for itself, would else wait for others in a barrier, or do nothing
    on ranks other than 0.
    """
    from torch import distributed

    thread = threading.get_ident()
    answers = {'is_initialized': False, 'get_rank': 0, 'get_world_size': 1, 'barrier': None}
    before = {name: getattr(distributed, name) for name in answers if hasattr(distributed, name)}

    def replaced(function: Callable[..., Any], answer: Any) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            return answer if threading.get_ident() == thread else function(*args, **kwargs)

        return ask

    for name, function in before.items():
        setattr(distributed, name, replaced(function, answers[name]))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(distributed, name, function)
