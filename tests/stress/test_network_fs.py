"""Saves on a network file system whose clients cache names for a minute, looked at from a host that caches nothing.

`tests.helpers.faults.moosefs` says what such a file system is, `tests.helpers.faults.network_saves` what is saved and
how it is judged. With ``--times 3`` the saves in a row are made three times.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checks.assert_intact import check_all
from tests.helpers.faults import network_saves as saves
from tests.helpers.faults.moosefs import Host, MooseFS, moosefs
from tests.helpers.faults.network_saves import Way, look
from tests.helpers.faults.numbered import NAME, tiny_model
from tests.helpers.ranks.launch import run_ranks
from tests.helpers.ranks.scenarios import check, error_of, run_scenarios_on_rank
from xhf_hooks.files.output_file import OutputFile

pytestmark = pytest.mark.needs('MooseFS')

CACHE_SECS = 60.0
#: Hosts of ranks 0, 1, ..., and how they save five times in a row.
ROWS: dict[tuple[str, ...], list[Way]] = {
    ('host0', 'host1'): [Way(writer, door, 1 + (door == 'run')) for writer in saves.WRITERS for door in saves.DOORS],
    ('host0', 'host1', 'host2'): [Way('positional', 'async'), Way('parallel', 'call'), Way('stream', 'run', 2)],
    ('uncached', 'host1'): [Way('positional', 'run'), Way('parallel', 'call', 2)],
}
NUMBERS = range(1, 6)
#: A run is killed before its n-th rename of the third save.
RENAMES = (0, 1, 2)


@pytest.fixture(scope='module')
def fs(tmp_path_factory):
    with moosefs(tmp_path_factory.mktemp('moosefs') / 'fs') as fs:
        fs.add_host('judge', 0)
        fs.add_host('uncached', 0)
        for name in ('host0', 'host1', 'host2', 'doomed0'):
            fs.add_host(name, CACHE_SECS)
        yield fs


def new_folder(fs: MooseFS, name: str) -> Path:
    """Where a run saves; made by the judge."""
    fs.hosts['judge'].sees(fs.mounted / name).mkdir()
    return fs.mounted / name


def on_hosts(hosts: Sequence[Host], function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` on the host of this rank, in a process group. Runs on: all ranks, with ``init=None``."""
    hosts[int(os.environ['RANK'])].enter()
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend='gloo')
    return function(*args)


def launch(fs: MooseFS, names: Sequence[str], function: Any, *args: Any, **options: Any) -> list[Any]:
    """`run_ranks`, with each rank on the host of that name."""
    hosts = [fs.hosts[name] for name in names]
    return run_ranks(on_hosts, len(hosts), hosts, function, *args, init=None, **options)


def test_a_host_believes_an_old_name(fs):
    """Without this fault in the file system nothing here would prove anything."""
    parent = new_folder(fs, 'believes')
    here, there, judge = (fs.hosts[name].sees(parent) for name in ('host0', 'host1', 'judge'))
    for text in ('first', 'second'):
        if text == 'second':
            (here / 'used').rename(here / 'final')
        (here / 'used').mkdir()
        (here / 'used' / 'file').write_text(text)
        read = [(host / 'used' / 'file').read_text() for host in (here, there, judge)]
        assert read == [text, 'first', text]


# A host that dies


def save_until_death(host: Host, parent: Path) -> str:
    """Save twice; in a third save the host of rank 0 dies. Runs on: all ranks; returns a survivor's error.

    It dies before it writes: after a write, the server lets nobody else write there for two minutes.
    """
    model, way = tiny_model(zero3=True), Way('positional', 'call')
    for number in (1, 2):
        saves.call_save(model, way, parent, number)
    write = OutputFile.write

    def write_or_die(self: OutputFile, *args: Any) -> None:
        if dist.get_rank() == 0:
            host.die()
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, *args)

    with mock.patch.object(OutputFile, 'write', write_or_die):
        return error_of(saves.call_save, model, way, parent, 3)


def test_when_the_host_of_rank_0_dies_its_last_save_is_whole(fs):
    parent = new_folder(fs, 'rank_0_died')
    _, said = launch(fs, ('doomed0', 'host1'), save_until_death, fs.hosts['doomed0'], parent, expected_deaths={0})
    assert said.startswith('RankLostError'), said
    assert check_all(fs.hosts['judge'].sees(parent)) == {NAME: 2}


# Five in a row


@pytest.fixture(scope='module')
def rows(fs, turn):
    results = {}
    for hosts, ways in ROWS.items():
        folders = {str(way): new_folder(fs, f'{turn}_{"_".join(hosts)}_{way}') for way in ways}
        todo = {
            str(way): partial(saves.save_in_a_row, way, folders[str(way)], NUMBERS, fs.hosts['judge'].sees)
            for way in ways
        }
        per_rank = launch(fs, hosts, run_scenarios_on_rank, todo)
        results |= {(hosts, name): [outcomes[name] for outcomes in per_rank] for name in todo}
    return results


@pytest.mark.parametrize(('hosts', 'way'), [(hosts, way) for hosts, ways in ROWS.items() for way in ways], ids=str)
def test_five_saves_in_a_row(rows, hosts, way):
    older = [{f'{NAME}_iter_{n - 1}': n - 1} if way.max_keep == 2 and n > 1 else {} for n in NUMBERS]
    seen = check(rows, (hosts, str(way)))[0]
    assert seen[:-1] == [{NAME: n, **more} for n, more in zip(NUMBERS, older, strict=True)]
    assert seen[-1] == seen[-2]


# What a killed run left, found by another host


def save_until_rename(before: int, parent: Path) -> None:
    """Save twice; a third save ends before a rename. Runs on: all ranks."""
    model = tiny_model(zero3=True)
    run = saves.run_of(model, Way('positional', 'run', 2), parent)
    for number in (1, 2):
        saves.save_in_run(run, model, number)
    rename, calls = os.rename, []

    def rename_or_die(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) > before:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*args, **kwargs)

    with mock.patch('os.rename', rename_or_die if dist.get_rank() == 0 else rename):
        if error_of(saves.save_in_run, run, model, 3):
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize('before', RENAMES)
def test_another_host_puts_right_what_a_killed_run_left(fs, before):
    parent = new_folder(fs, f'killed_before_{before}')
    said = launch(fs, ('host0', 'host1'), save_until_rename, before, parent, expected_deaths={0, 1})
    assert said == [None, None]
    assert {path.name for path in fs.hosts['judge'].sees(parent).iterdir() if not path.name.startswith('.')}
    args = Way('parallel', 'run', 2), parent, [4], fs.hosts['judge'].sees
    (seen, last), *_ = launch(fs, ('host1', 'host0', 'host2'), saves.save_in_a_row, *args)
    assert seen == last and seen[NAME] == 4 and set(seen.values()) in ({2, 4}, {3, 4}), seen


# Two runs, one folder


def two_runs(hosts: Sequence[Host], parent: Path, signs: Path, judge: Host) -> Any:
    """Rank 0 is one run, rank 1 another, whose host has cached the lock of a run before both.

    Runs on: all ranks, without a process group.
    """
    is_first = os.environ['RANK'] == '0'
    hosts[int(os.environ['RANK'])].enter()
    torch.set_num_threads(1)
    model, way = tiny_model(zero3=False), Way('positional', 'run')

    def wait_for(sign: str) -> None:
        deadline = time.monotonic() + 120
        while not (signs / sign).exists():
            assert time.monotonic() < deadline, sign
            time.sleep(0.02)

    if is_first:
        older = saves.run_of(model, way, parent)
        (signs / 'locked').touch()
        wait_for('looked')
        older.close()
        run = saves.run_of(model, way, parent)
        saves.save_in_run(run, model, 1)
        (signs / 'saved').touch()
        wait_for('refused')
        saves.save_in_run(run, model, 2)
        run.close()
        (signs / 'ended').touch()
        return ''
    wait_for('locked')
    assert (parent / f'.{NAME}.lock').exists()
    (signs / 'looked').touch()
    wait_for('saved')
    message = error_of(saves.call_save, model, way, parent, 10)
    (signs / 'refused').touch()
    wait_for('ended')
    before = look(judge.sees(parent))
    saves.call_save(model, way, parent, 11)
    return message, before


def test_a_second_run_on_another_host_is_refused_while_the_first_lives(fs, tmp_path):
    parent = new_folder(fs, 'two_runs')
    hosts = [fs.hosts[name] for name in ('host0', 'host1')]
    _, (message, before) = run_ranks(two_runs, 2, hosts, parent, tmp_path, fs.hosts['judge'], init=None)
    assert 'is in use by' in message and before == {NAME: 2}
    assert look(fs.hosts['judge'].sees(parent)) == {NAME: 11}
