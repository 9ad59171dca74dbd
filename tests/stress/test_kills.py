"""Runs that save continuously and are killed at random instants. With ``--times 10`` each ten times.

Each life is a group of real ranks, forked from the server of `tests.helpers.ranks.launch`.
"""

import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest

from tests.helpers.checks.assert_intact import assert_whole, check_all, hidden, weight_of
from tests.helpers.faults.numbered import NAME, fill, tiny_model
from tests.helpers.ranks.killed import WORLD_SIZE, ending, join_group
from tests.helpers.ranks.launch import HANG_SECS, start_process
from tests.helpers.runs.engines import open_run
from tests.helpers.runs.tiny_checkpoint import iteration
from xhf_hooks import save_hf
from xhf_hooks.errors import XhfError
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.ranks.collective import Collective

#: About the time of a save of these models; a kill comes at a random instant within a little more than that.
SAVE_SECS = 0.12


@dataclass(frozen=True)
class Kind:
    """How a run saves and is killed.

    Attributes:
        zero3: Whether DeepSpeed partitions parameters; otherwise every rank has all of them.
        victims: 'all' or 'one' (a random rank).
        with_all: Whether the run also uploads, keeps some saves for good, and saves on SIGTERM.
        by_calls: Whether a loop of its own saves, by calls of ``save_hf``.
    """

    writer: str
    in_background: bool
    zero3: bool
    signal: signal.Signals
    victims: str
    with_all: bool = False
    by_calls: bool = False

    def __str__(self) -> str:
        way = f'{self.writer}{"_async" if self.in_background else ""}{"_with_all" if self.with_all else ""}'
        way += '_by_calls' if self.by_calls else ''
        return f'{way}_{"zero3" if self.zero3 else "whole"}_{self.signal.name}_{self.victims}'


@dataclass(frozen=True)
class Death:
    """The outcome of one life: the last save that a rank saw committed, and what the survivors said.

    Attributes:
        copied: The last background save for which all ranks had copied their bytes.
    """

    copied: int
    committed: int
    survivors: list[str]


def live_and_die(parent: Path, kind: Kind, first: int, dice: random.Random, max_keep: int = 1) -> Death:
    """Run one life in ``parent``, with saves numbered from ``first``, and check what is visible afterwards.

    Raises:
        AssertionError: A visible save is incomplete, a committed save is lost, or a survivor hangs.
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
    found = check_all(parent).get(NAME, 0)
    assert committed <= found <= began, f'{kind}: save {committed} is lost, found {found}'
    copied = max([n for what, n in said if what == 'copied' and said.count((what, n)) == WORLD_SIZE], default=0)
    return Death(copied, committed, [text for what, text in said if what == 'error'])


def next_start(parent: Path, max_keep: int = 1) -> dict[str, int]:
    """Clean up like the next run and return what it finds before it saves. Runs in this process.

    Raises:
        AssertionError: There are leftovers, or the newest save is older than before.
    """
    before = check_all(parent)
    folder = CheckpointFolder(parent / NAME, max_keep)
    folder.lock_and_recover()
    folder.unlock()
    after = check_all(parent)
    assert hidden(parent) == []
    assert after.get(NAME, 0) >= before.get(NAME, 0)
    return after


def _listen(readers: list[Connection], until: tuple[str, int] | None) -> list[tuple[str, Any]]:
    """Messages of ranks, until one of them is ``until`` or all ranks have ended."""
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
    """One rank. Ends when it is killed, or after reporting the loss of another rank."""
    join_group(rank, store)
    try:
        (_call_for_ever if kind.by_calls else _save_for_ever)(parent, kind, first, max_keep, connection)
    except XhfError as error:
        connection.send(('error', f'{type(error).__name__}: {error}'))
    except BaseException as error:
        connection.send(('error', f'not ours: {error!r}'))
    connection.close()
    os._exit(3)  # at once: the process group is broken


def _save_for_ever(parent: Path, kind: Kind, first: int, max_keep: int, connection: Connection) -> None:
    model = tiny_model(kind.zero3)
    how = dict(writer=kind.writer, async_save=kind.in_background, bucket_size=20_000, max_shard_size=10_000)
    how |= dict(max_keep_ckpts=max_keep, on_error='raise', collective=Collective.connect(timeout_secs=HANG_SECS))
    if kind.with_all:
        how |= dict(upload_to=store_of(parent).as_uri(), upload_keep=2, keep_every=4, save_on_signal='SIGTERM')
    saves = open_run(model, parent / NAME, **how)
    for number in itertools.count(first):
        fill(model, weight_of(number))
        connection.send(('began', number))
        saves.save(iteration(number))
        if kind.in_background:
            connection.send(('copied', number))
            fill(model, -1)  # training goes on
            saves.wait_for_background_save()
        connection.send(('committed', number))
        saves.save_if_requested(iteration(number))


def _call_for_ever(parent: Path, kind: Kind, first: int, max_keep: int, connection: Connection) -> None:
    model = tiny_model(kind.zero3)
    how = dict(writer=kind.writer, bucket_size=20_000, max_shard_size=10_000, max_keep_ckpts=max_keep)
    for number in itertools.count(first):
        fill(model, weight_of(number))
        connection.send(('began', number))
        made = save_hf(model, parent / NAME, step=number, async_save=kind.in_background, **how)
        if kind.in_background:
            connection.send(('copied', number))
            fill(model, -1)  # training goes on
            made.result()
        connection.send(('committed', number))


def store_of(parent: Path) -> Path:
    """Where runs in this folder upload their saves to."""
    return parent.with_name(f'{parent.name}.uploads')


# The tests

#: Each writer, both signals, all ranks and one, in the background and not, at ZeRO-3 and not.
KINDS = [
    Kind('stream', False, False, SIGKILL, 'all'),
    Kind('positional', False, True, SIGKILL, 'one'),
    Kind('positional', True, False, SIGKILL, 'all'),
    Kind('parallel', False, False, SIGKILL, 'one'),
    Kind('stream', True, True, SIGKILL, 'one'),
    Kind('positional', False, False, SIGTERM, 'all'),
    Kind('parallel', True, False, SIGTERM, 'all'),
    Kind('positional', True, True, SIGTERM, 'one'),
    Kind('positional', True, True, SIGKILL, 'all', by_calls=True),
    Kind('positional', True, False, SIGTERM, 'all', by_calls=True),
    Kind('stream', True, False, SIGKILL, 'one', by_calls=True),
]


@pytest.fixture(scope='module')
def parent(tmp_path_factory):
    """One folder for all lives: each starts with what the one before left."""
    return tmp_path_factory.mktemp('lives')


@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_nothing_is_lost_and_the_next_run_saves(parent, kind, turn):
    max_keep = 1 + turn % 3
    first = next_start(parent, max_keep).get(NAME, 0) + 1
    death = live_and_die(parent, kind, first, random.Random(f'{kind}{turn}'), max_keep)
    found = next_start(parent, max_keep).get(NAME, 0)
    assert found >= death.committed
    if kind.victims == 'one':
        assert death.survivors, 'nobody noticed'
        assert all('not ours' not in text for text in death.survivors), death.survivors
    if kind.in_background and kind.signal is SIGTERM and kind.victims == 'all':
        assert found >= death.copied, 'the save that was being written was to be finished'


@pytest.mark.parametrize('signal_number', [SIGKILL, SIGTERM], ids=lambda number: number.name)
def test_a_run_that_also_uploads_and_deletes_ends_at_any_instant(tmp_path_factory, signal_number, turn):
    """SIGKILL loses nothing that was committed, here and in the store; after SIGTERM nothing is left to do."""
    parent = tmp_path_factory.mktemp('with_all')
    kind = Kind('positional', turn % 2 == 0, False, signal_number, 'all', with_all=True)
    for life in range(2):  # the second one starts with what the first one left
        first = next_start(parent, 2).get(NAME, 0) + 1
        dice = random.Random(f'{signal_number}{turn}{life}')
        death = live_and_die(parent, kind, first, dice, 2)
        if signal_number is SIGTERM:
            assert hidden(parent) == [], 'an end waits for deletions and uploads'
        newest = newest_upload(parent)
        found = next_start(parent, 2).get(NAME, 0)
        assert found >= max(death.committed, newest)
        assert signal_number is SIGKILL or newest == found, 'the last save was not uploaded'


def newest_upload(parent: Path) -> int:
    """The iteration of the newest uploaded save, which is complete; 0 if there is none."""
    found = [0]
    for pointer in store_of(parent).glob(f'*/{NAME}.json'):
        content = json.loads(pointer.read_text())
        if content['newest'] is not None:
            assert_whole(pointer.parent / content['newest'])
            found.append(content['step']['number'])
    return max(found)
