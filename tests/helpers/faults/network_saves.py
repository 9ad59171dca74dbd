"""Saves in a row, judged after each one by somebody with their own view of the files.

All weights of a save are its number, so a judge needs to ask no rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn

from tests.helpers.checks.assert_intact import check_all, hidden
from tests.helpers.faults.numbered import NAME, fill, tiny_model
from tests.helpers.runs.engines import open_run
from tests.helpers.runs.tiny_checkpoint import iteration
from xhf_hooks import save_hf
from xhf_hooks.runs.run import Run

WRITERS = ('positional', 'parallel', 'stream')
#: How to save: a `save_hf` call each time; many saves of one run; the same in the background.
DOORS = ('call', 'run', 'async')
#: Gives at least as many files as ranks: with 'parallel', each file has one writer.
SIZES = dict(bucket_size=20_000, max_shard_size=8_000)
#: The path by which any process sees a path as a host does.
Eyes = Callable[[Path], Path]


@dataclass(frozen=True)
class Way:
    """How to save several times in a row."""

    writer: str
    door: str
    max_keep: int = 1

    def __str__(self) -> str:
        return f'{self.writer}_{self.door}_keep_{self.max_keep}'


def look(parent: Path, during_run: bool = False) -> dict[str, int] | str:
    """Visible saves, if each is whole and of one save, and nothing is hidden beside them; else what is wrong.

    Args:
        during_run: A run deletes in the background what it no longer needs.
    """
    try:
        found, left = check_all(parent), hidden(parent)
        left = [name for name in left if not during_run or '.discarded-' not in name]
    except Exception as error:  # other ranks wait for this one
        return f'{type(error).__name__}: {error}'
    return f'left: {left}' if left else found


def save_in_a_row(way: Way, parent: Path, numbers: Sequence[int], sees: Eyes = Path) -> list[dict[str, int] | str]:
    """Save once for each of ``numbers``. Runs on: all ranks.

    Returns:
        What the judge finds after each save and after the end of the run; empty on other ranks than 0.
    """
    model, seen = tiny_model(zero3=True), []

    def judge(during_run: bool = False) -> None:
        if dist.get_rank() == 0:
            seen.append(look(sees(parent), during_run))
        dist.barrier()

    if way.door == 'call':
        for number in numbers:
            call_save(model, way, parent, number)
            judge()
    else:
        saves = run_of(model, way, parent)
        try:
            for number in numbers:
                save_in_run(saves, model, number)
                fill(model, -1)  # training goes on
                saves.wait_for_background_save()
                judge(during_run=True)
        finally:
            saves.close()
    judge()
    return seen


def call_save(model: nn.Module, way: Way, parent: Path, number: int) -> None:
    """`save_hf`. Runs on: all ranks."""
    fill(model, number)
    save_hf(model, parent / NAME, step=number, writer=way.writer, max_keep_ckpts=way.max_keep, **SIZES)


def run_of(model: nn.Module, way: Way, parent: Path) -> Run:
    """A run that is ready to save, set up like a hook does. Runs on: all ranks."""
    own = dict(max_keep_ckpts=way.max_keep, writer=way.writer, async_save=way.door == 'async', on_error='raise')
    return open_run(model, parent / NAME, **own, **SIZES)


def save_in_run(saves: Run, model: nn.Module, number: int) -> None:
    """Make one save of a run; a background save may still be running afterwards. Runs on: all ranks."""
    fill(model, number)
    saves.save(iteration(number))
