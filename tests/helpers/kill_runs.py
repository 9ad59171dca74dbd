"""Lives of a run that saves all the time and is killed at a random instant; what is on disk afterwards.

Each life is a group of real ranks, forked from the server of `tests.helpers.ranks`. Every save's weights are filled
with its number, so a folder tells which save it is of, and whether all of it is of that one.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.assert_intact import check_all, hidden, weight_of
from tests.helpers.killed_ranks import WORLD_SIZE, ending, join_group
from tests.helpers.ranks import HANG_SECS, start_process
from tests.helpers.zero_config import zero_config

if TYPE_CHECKING:
    from torch import nn

NAME = 'hf_model'
#: A save of these models takes about so long here; a kill comes at a random instant of that and a little more.
SAVE_SECS = 0.12


@dataclass(frozen=True)
class Kind:
    """How a life is lived and ended.

    Attributes:
        zero3: Parameters are partitioned by DeepSpeed; else they are whole on every rank.
        victims: 'all' or 'one' (a random rank).
    """

    writer: str
    in_background: bool
    zero3: bool
    signal: signal.Signals
    victims: str

    def __str__(self) -> str:
        way = f'{self.writer}{"_async" if self.in_background else ""}'
        return f'{way}_{"zero3" if self.zero3 else "whole"}_{self.signal.name}_{self.victims}'


KINDS = [
    Kind(writer, in_background, zero3, number, victims)
    for number in (signal.SIGKILL, signal.SIGTERM)
    for writer in ('stream', 'parallel', 'positional')
    for in_background in (False, True)
    for victims in ('all', 'one')
    for zero3 in (True, False)
]


@dataclass(frozen=True)
class Death:
    """What came of one life.

    Attributes:
        began: The last save that a rank began.
        copied: The last save in the background of which all ranks had copied their bytes.
        committed: The last save that a rank saw committed.
        found: What is on disk, name to save.
    """

    began: int
    copied: int
    committed: int
    found: dict[str, int]
    survivors: list[str]


def live_and_die(parent: Path, kind: Kind, first: int, dice: random.Random, max_keep: int = 1) -> Death:
    """One life in ``parent``, saves numbered from ``first`` on, and a check of what is visible after it.

    Raises:
        AssertionError: Something visible is not whole, a committed save is lost, or a survivor hangs.
    """
    ends = [multiprocessing.Pipe(duplex=False) for _ in range(WORLD_SIZE)]
    store = parent.with_name(f'{parent.name}.store{first}')
    ranks: list[Any] = []
    readers = [ours for ours, _ in ends]
    with ending(ranks, kind):
        for rank, (_, theirs) in enumerate(ends):
            ranks.append(start_process(_live, parent, kind, first, max_keep, rank, str(store), theirs))
            theirs.close()
        strike = first + dice.randrange(3)
        said = _listen(readers, until=('began', strike))
        time.sleep(dice.random() * SAVE_SECS)
        victims = ranks if kind.victims == 'all' else [dice.choice(ranks)]
        for victim in victims:
            os.kill(victim.pid, kind.signal)
        said += _listen(readers, until=None)
    store.unlink(missing_ok=True)
    for victim in victims:
        assert victim.exitcode == -kind.signal, f'{kind}: a victim ended with {victim.exitcode}: {said[-3:]}'
    began, committed = (max([n for what, n in said if what == word], default=0) for word in ('began', 'committed'))
    found = check_all(parent)
    assert not committed or found.get(NAME, 0) >= committed, f'{kind}: save {committed} is lost, found {found}'
    assert found.get(NAME, 0) <= began
    copied = max([n for what, n in said if what == 'copied' and said.count((what, n)) == WORLD_SIZE], default=0)
    return Death(began, copied, committed, found, [text for what, text in said if what == 'error'])


def next_start(parent: Path, max_keep: int = 1) -> dict[str, int]:
    """What the next run finds when it has swept, before it saves. Runs in this process.

    Raises:
        AssertionError: Something is left over, or the newest save went back.
    """
    from xhf_hooks.commit.checkpoint_folder import CheckpointFolder

    before = check_all(parent)
    folder = CheckpointFolder(parent / NAME, max_keep)
    folder.claim()
    folder.release()
    after = check_all(parent)
    assert hidden(parent) == []
    assert after.get(NAME, 0) >= before.get(NAME, 0)
    return after


def _listen(readers: list[Connection], until: tuple[str, int] | None) -> list[tuple[str, Any]]:
    """What ranks say, until one of them says ``until``, or all have ended."""
    said: list[tuple[str, Any]] = []
    while readers and until not in said:
        ready = wait(readers, timeout=HANG_SECS)
        assert ready, f'nothing was said for {HANG_SECS} s, after {said[-5:]}'
        for reader in ready:
            try:
                said.append(reader.recv())
            except (EOFError, ConnectionResetError):
                readers.remove(reader)
    assert until is None or until in said, f'the ranks ended before {until}: {said}'
    return said


def _live(parent: Path, kind: Kind, first: int, max_keep: int, rank: int, store: str, connection: Connection) -> None:
    """One rank. Ends when it is killed, or with what it says of the loss of another."""
    from xhf_hooks.errors import XhfError

    join_group(rank, store)
    try:
        _save_for_ever(parent, kind, first, max_keep, connection)
    except XhfError as error:
        connection.send(('error', f'{type(error).__name__}: {error}'))
    except BaseException as error:
        connection.send(('error', f'not ours: {error!r}'))
    connection.close()
    os._exit(3)  # at once: the process group is broken


def _save_for_ever(parent: Path, kind: Kind, first: int, max_keep: int, connection: Connection) -> None:
    from xhf_hooks.commit.checkpoint_folder import CheckpointFolder
    from xhf_hooks.concurrency.exit_guard import ExitWait
    from xhf_hooks.config.options import SaveOptions
    from xhf_hooks.distributed.collective import Collective
    from xhf_hooks.planning.types import Step
    from xhf_hooks.save import Saver

    model = tiny_model(kind.zero3)
    collective = Collective(timeout_secs=HANG_SECS)
    options = SaveOptions(bucket_size=20_000, max_shard_size=10_000)
    saver = Saver(model, options, collective, writer=kind.writer, in_background=kind.in_background)
    saver.prepare()
    folder = CheckpointFolder(parent / NAME, max_keep)
    with collective.stage('preflight'):
        if collective.rank == 0:
            folder.claim()
    if kind.in_background:
        ExitWait(lambda: saver.background.wait(HANG_SECS))
    number = first
    while True:
        fill(model, weight_of(number))
        connection.send(('began', number))
        if kind.in_background:
            saver.start(folder, Step('iter', number, number))
            connection.send(('copied', number))
            fill(model, -1)  # training goes on
            saver.background.outcome()
        else:
            saver.save(folder, Step('iter', number, number))
        connection.send(('committed', number))
        number += 1


def tiny_model(zero3: bool) -> nn.Module:
    """Fourteen tensors; at ZeRO-3 in bfloat16."""
    from tests.helpers.zoo.llamas import llama

    if not zero3:
        return llama()
    import deepspeed
    import torch

    with deepspeed.zero.Init(config_dict_or_path=zero_config(3), dtype=torch.bfloat16):
        return llama()


def fill(model: nn.Module, number: int) -> None:
    """Give every weight, or this rank's part of it, one value."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            getattr(parameter, 'ds_tensor', parameter).fill_(number)
