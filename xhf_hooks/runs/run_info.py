"""What a frontend knows of its run: what is saved, and where saves go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.runs.unwrap import Unwrapped


@dataclass(frozen=True)
class RunInfo:
    """One run, as its hook, callback or call of ``save_hf`` knows it.

    Attributes:
        unwrapped: The trained model without its wrappers.
        folder: The folder of the newest save.
        schedule: Describes the schedule, for the log; None means no schedule.
        tokenizer: The run's tokenizer. The option ``tokenizer`` overrides it; the base model's is the fallback.
        trainer: The object that trains, such as MMEngine's runner. It identifies the run: a later run with another
            trainer closes this run's :class:`.Run` if its training was interrupted; a second hook with the same trainer
            does not (:meth:`.RunEnd.begin`).
        timestamp: When the run began, as MMEngine writes it, such as '20261127_201530'; None: it begins now. Uploads
            of the run are named after it.
        remove_leftovers_in: A work_dir from which leftovers of killed runs are removed.
        may_replace: Whether saves may replace those that are there before the run.
        is_resumed: Whether training goes on from a checkpoint, and so with the training that made the newest save in
            the folder; False: it begins anew. None: unknown, so it goes on if its first save has no smaller step than
            that one. Each training keeps its own saves of ``keep_every``.
        extra_suffixes: The suffix of each extra target, such as 'best'. An extra target keeps one save.
    """

    unwrapped: Unwrapped
    folder: Path
    schedule: str | None
    tokenizer: Any | None = None
    trainer: object | None = None
    timestamp: str | None = None
    remove_leftovers_in: Path | None = None
    may_replace: bool = True
    is_resumed: bool | None = None
    extra_suffixes: Sequence[str] = ()
