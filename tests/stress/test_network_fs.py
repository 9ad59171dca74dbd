"""Saves on a network file system whose clients cache names for a minute, looked at from a host that caches nothing.

`tests.helpers.moosefs` says what such a file system is, `tests.helpers.network_saves` what is saved and how it is
judged. With ``--times 2`` the saves in a row are made twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NOT_TESTED
from tests.helpers import lost_hosts
from tests.helpers import network_saves as saves
from tests.helpers.moosefs import MooseFS, missing, moosefs
from tests.helpers.network_saves import NAME, Way, judged
from tests.helpers.ranks import run_ranks
from tests.helpers.scenarios import check

pytestmark = pytest.mark.skipif(
    missing() is not None, reason=f'{NOT_TESTED}saves on a network file system: {missing()}'
)

CACHE_SECS = 60.0
#: Hosts of ranks 0, 1, ..., and how they save five times in a row.
ROWS: dict[str, tuple[tuple[str, ...], list[Way]]] = {
    'two_hosts': (
        ('host0', 'host1'),
        [
            *(Way(writer, door) for writer in saves.WRITERS for door in saves.DOORS),
            *(Way(writer, door, 2) for writer, door in zip(saves.WRITERS, ('run', 'call', 'async'), strict=True)),
        ],
    ),
    'three_hosts': (
        ('host0', 'host1', 'host2'),
        [Way(writer, door) for writer in saves.WRITERS for door in ('call', 'async')],
    ),
    'rank_0_caches': (('host0', 'uncached'), [Way('positional', 'call'), Way('parallel', 'async')]),
    'rank_1_caches': (('uncached', 'host1'), [Way('positional', 'run'), Way('parallel', 'call', 2)]),
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


def launch(fs: MooseFS, names: Sequence[str], function: Any, *args: Any, **options: Any) -> list[Any]:
    """`run_ranks`, with each rank on the host of that name."""
    hosts = [fs.hosts[name] for name in names]
    return run_ranks(saves.on_hosts, len(hosts), hosts, function, *args, init=None, **options)


def look(fs: MooseFS, parent: Path, number: int) -> saves.Seen:
    return judged(fs.hosts['judge'].sees(parent), number)


def assert_sound(seen: saves.Seen, leftovers: Sequence[str] = ()) -> None:
    assert seen.damage == [] and seen.leftovers == list(leftovers), seen


# The component itself


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


# A host that dies. First here, since the server takes two minutes to notice


@pytest.fixture(scope='module')
def without_host_of_rank_0(fs):
    parent = new_folder(fs, 'rank_0_died')
    said = launch(
        fs, ('doomed0', 'host1'), lost_hosts.save_until_death, fs.hosts['doomed0'], 0, parent, expected_deaths={0}
    )
    return parent, said


def test_when_the_host_of_rank_0_dies_its_last_save_is_whole(fs, without_host_of_rank_0):
    parent, said = without_host_of_rank_0
    assert said[0] is None and said[1].startswith('RankLostError'), said
    assert look(fs, parent, 2).damage == []


# Five in a row


@pytest.fixture(scope='module')
def rows(fs, turn):
    results = {}
    for row, (names, ways) in ROWS.items():
        todo = {
            str(way): partial(
                saves.save_in_a_row, way, new_folder(fs, f'{turn}_{row}_{way}'), fs.hosts['judge'], NUMBERS
            )
            for way in ways
        }
        hosts = [fs.hosts[name] for name in names]
        per_rank = run_ranks(saves.scenarios_on_hosts, len(hosts), hosts, todo, init=None)
        results |= {(row, name): [outcomes[name] for outcomes in per_rank] for name in todo}
    return results


@pytest.mark.parametrize(('row', 'way'), [(row, way) for row, (_, ways) in ROWS.items() for way in ways], ids=str)
def test_five_saves_in_a_row(rows, row, way):
    seen = check(rows, (row, str(way)))[0]
    for one in seen:
        assert_sound(one)
    assert [one.number for one in seen] == [*NUMBERS, NUMBERS[-1]]
    kept = {NAME: NUMBERS[-1]} | {f'{NAME}_iter_{NUMBERS[-2]}': NUMBERS[-2] for _ in range(way.max_keep - 1)}
    assert seen[-1].folders == kept


# What a killed run left, found by another host


@pytest.mark.parametrize('before', RENAMES)
def test_another_host_puts_right_what_a_killed_run_left(fs, before):
    parent = new_folder(fs, f'killed_before_{before}')
    said = launch(fs, ('host0', 'host1'), lost_hosts.save_until_rename, before, parent, expected_deaths={0, 1})
    assert said[0] is None, f'the save has fewer than {before + 1} renames'
    visible = {path.name for path in fs.hosts['judge'].sees(parent).iterdir() if not path.name.startswith('.')}
    assert visible, 'no save is left'
    (seen, last), *_ = launch(
        fs, ('host1', 'host0', 'host2'), saves.save_in_a_row, Way('parallel', 'run', 2), parent, fs.hosts['judge'], [4]
    )
    assert_sound(seen)
    assert_sound(last)
    assert last.folders[NAME] == 4 and set(last.folders.values()) in ({2, 4}, {3, 4})


# Two runs, one folder


def test_a_second_run_on_another_host_is_refused_while_the_first_lives(fs, tmp_path):
    parent = new_folder(fs, 'two_runs')
    hosts = [fs.hosts[name] for name in ('host0', 'host1')]
    seen, (error, last) = run_ranks(lost_hosts.two_runs, 2, hosts, parent, tmp_path, fs.hosts['judge'], init=None)
    assert 'is in use by' in error
    for one in (*seen, last):
        assert_sound(one)


# Last: by now the server may have noticed


def test_when_the_host_of_rank_0_has_died_another_goes_on(fs, without_host_of_rank_0):
    parent, _ = without_host_of_rank_0
    deadline = time.monotonic() + 300
    while True:
        try:
            (seen, last), _ = launch(
                fs, ('host1', 'host2'), saves.save_in_a_row, Way('positional', 'call'), parent, fs.hosts['judge'], [4]
            )
            break
        except AssertionError as error:
            # The server still keeps the lock of the host that died
            if 'is in use by' not in str(error) or time.monotonic() > deadline:
                raise
    assert_sound(seen)
    assert_sound(last)
