"""The log lines of saves, and their stages with times."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from xhf_hooks.format.text import counted, some
from xhf_hooks.model import names_by_identity
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.sources.host_memory import MemoryMeter


class SaveClock:
    """Times one save, stage by stage, and meters its memory. Runs on: all ranks, one thread at a time.

    Args:
        call_began: ``time.perf_counter()`` when a call began that makes this save alone: the time before the save
            counts as a stage, too. None: the save begins now.
    """

    def __init__(self, call_began: float | None = None) -> None:
        self.meter = MemoryMeter()
        now = time.perf_counter()
        self._started = now if call_began is None else call_began
        self._begun = [('plan', now)] if call_began is None else [('preflight', call_began), ('plan', now)]
        self._stalled_secs: float | None = None

    def begin(self, stage: str) -> None:
        """Count the time from now on as this stage."""
        self._begun.append((stage, time.perf_counter()))

    def training_goes_on(self) -> None:
        """Called when training goes on; later time does not count as a stall."""
        self._stalled_secs = self.seconds

    @property
    def seconds(self) -> float:
        """Time since the save began."""
        return time.perf_counter() - self._started

    @property
    def stalled_secs(self) -> float:
        """Seconds for which the save has stalled training."""
        return self.seconds if self._stalled_secs is None else self._stalled_secs

    @property
    def stage_secs(self) -> dict[str, float]:
        """Seconds by stage, in the order in which they began."""
        found = dict.fromkeys((stage for stage, _ in self._begun), 0.0)
        for (stage, began), (_, ended) in pairwise([*self._begun, ('', time.perf_counter())]):
            found[stage] += ended - began
        return found


#: Held while a line is written, and during a fork: in the child, such as a data loader worker, the stream would be
#: locked for ever, by a thread that is not there. Python renews only logging's own locks (bpo-6721).
_WRITING = threading.RLock()
os.register_at_fork(before=_WRITING.acquire, after_in_parent=_WRITING.release, after_in_child=_WRITING.release)


class RunLog(logging.LoggerAdapter):
    """A logger whose lines begin with a name. Used by: any thread.

    Args:
        only_errors: Drop everything but errors: for ranks other than 0, of a logger that every rank has.

    Attributes:
        said: Lines that are not repeated unless they are errors, since an earlier call that made one save has logged
            them. Each line is added. None: everything is logged.
        warned_once: The warnings of :meth:`warn_once`.
    """

    def __init__(self, logger: logging.Logger, name: str, *, only_errors: bool = False) -> None:
        super().__init__(logger, {})
        self._name, self._only_errors = name, only_errors
        self.said: set[str] | None = None
        self.warned_once: set[str] = set()

    def warn_once(self, message: str) -> None:
        """Log a warning about all saves of the run, unless it was logged so before."""
        if message not in self.warned_once:
            self.warned_once.add(message)
            self.warning(message)

    @contextlib.contextmanager
    def logging_errors_of_callbacks(self, step: Step) -> Iterator[None]:
        """Log what fails in this block: the save is good, and other ranks go on."""
        try:
            yield
        except Exception as error:  # of any type, since the user's code may run here, such as a visualizer
            self.error(f'{step.label} is saved, but a callback failed: {type(error).__name__}: {error}')

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        return f'{self._name}: {msg}', kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        if self.said is not None and level < logging.ERROR:
            if msg in self.said:
                return
            self.said.add(str(msg))
        with _WRITING:
            super().log(level, msg, *args, stacklevel=2, **kwargs)

    def isEnabledFor(self, level: int) -> bool:
        return (level >= logging.ERROR or not self._only_errors) and super().isEnabledFor(level)


class _LastResort(logging.StreamHandler):
    """Prints what no other handler does."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            super().emit(record)


def show(logger: logging.Logger, level: int = logging.INFO) -> None:
    """Make a logger's lines visible where nobody has set it up. Call it on the rank whose lines are wanted.

    A level or a handler that it has stays; lines go to the handlers of the root logger, and without any, to stderr.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
    if not logger.handlers:
        logger.addHandler(_LastResort())


def warn_of_left_out(log: RunLog, left_out: Collection[str], model: nn.Module) -> None:
    """Name what is trained and not saved, once.

    Args:
        left_out: The tensors that are not saved.
        model: The trained model.
    """
    if trained := trained_of(left_out, model):
        log.warn_once(
            f'trained, but not saved: {counted(len(trained), "tensor")} ({some(trained)}). The exported model '
            f'has no place for them. If they are of another model of transformers, save it with a second hook that has '
            f'the option module; otherwise register an exporter (docs/extending.md)'
        )


def trained_of(names: Collection[str], model: nn.Module) -> list[str]:
    """Those of these tensors that training changes."""
    wanted = set(names)
    parameters = [(names[0], tensor) for tensor, names in names_by_identity(model)] if wanted else []
    return [name for name, tensor in parameters if tensor.requires_grad and name in wanted]


def log_save(log: RunLog, committed: CommittedCheckpoint, *, whole_path: bool = False) -> None:
    """Log the warnings and the cost of a save. Fits a terminal of 100 columns.

    Args:
        whole_path: Name the folder by its path, since another run saves to a folder of the same name.
    """
    cost = committed.cost
    for warning in committed.warnings:
        if warning not in log.warned_once:
            log.warning(warning)
    rows = {
        'cost': f'training stalled for {cost.stalled_secs:.2f} s; {cost.gbytes_per_sec:.2f} GB/s; '
        f'at most {cost.peak_extra_nbytes / 1e6:.0f} MB of extra memory per rank',
        'stages': ', '.join(f'{stage} {seconds:.2f} s' for stage, seconds in cost.stage_secs.items()),
    }
    name = committed.path if whole_path else Path(committed.path).name
    title = f'saved {committed.step.label} to {name}, {cost.nbytes / 1e6:.1f} MB in {cost.seconds:.2f} s'
    log.info(table(title, rows))


def table(title: str, rows: Mapping[str, object]) -> str:
    """A message with one row per line, for names of up to six letters."""
    return '\n'.join([title, *(f'    {name:<7}{value}' for name, value in rows.items())])


def scalars(committed: CommittedCheckpoint) -> dict[str, float]:
    """The cost of a save as named numbers, for a visualizer."""
    cost = committed.cost
    stages = {f'hf_checkpoint/{stage}_seconds': seconds for stage, seconds in cost.stage_secs.items()}
    return {
        'hf_checkpoint/seconds': cost.seconds,
        'hf_checkpoint/stalled_seconds': cost.stalled_secs,
        'hf_checkpoint/nbytes': cost.nbytes,
        'hf_checkpoint/gbytes_per_sec': cost.gbytes_per_sec,
        'hf_checkpoint/peak_extra_mb': cost.peak_extra_nbytes / 1e6,
        **stages,
    }


class Progress:
    """Logs the progress of a save every half minute.

    Args:
        nbytes: About as many bytes will be written.
    """

    interval_secs = 30.0

    def __init__(self, log: RunLog, label: str, nbytes: int) -> None:
        self._log = log
        self._label = label
        self._nbytes = nbytes
        self._done_nbytes = 0
        self._last = time.monotonic()

    def wrote(self, nbytes: int) -> None:
        """Called for each part of a tensor that goes to the writer."""
        self._done_nbytes += nbytes
        if time.monotonic() - self._last >= self.interval_secs:
            self._last = time.monotonic()
            self._log.info(f'saving {self._label}, {self._done_nbytes / 1e9:.2f} of {self._nbytes / 1e9:.2f} GB')
