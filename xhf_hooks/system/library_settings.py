"""Settings of Python, torch and transformers that are changed inside a block."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
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
def replaced_in_this_thread(module: ModuleType, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of a module, by name, in the block and for this thread. Those that it lacks are left out."""
    thread = threading.get_ident()
    before = {name: getattr(module, name) for name in functions if hasattr(module, name)}

    def chosen(original: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (other if threading.get_ident() == thread else original)(*args, **kwargs)

        return call

    for name, original in before.items():
        setattr(module, name, chosen(original, functions[name]))
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(module, name, original)


@contextmanager
def as_the_only_process() -> Iterator[None]:
    """To code that asks torch.distributed in this thread, there is one process, without a process group.

    Code that runs on one rank alone, or on each rank for itself, would else wait for others in a barrier, or do nothing
    on ranks other than 0.
    """
    from torch import distributed

    answers = {'is_initialized': False, 'get_rank': 0, 'get_world_size': 1, 'barrier': None}
    functions = {name: lambda *args, answer=answer, **kwargs: answer for name, answer in answers.items()}
    with replaced_in_this_thread(distributed, functions):
        yield
