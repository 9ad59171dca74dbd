"""The same saves on ext4, XFS, Btrfs and tmpfs, and what a save needs of each: room, an exchange of folders, a lock."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NOT_TESTED
from tests.helpers import network_saves as saves
from tests.helpers.loop_mounts import KINDS, Disks, loop_mounts
from tests.helpers.network_saves import NAME, Way
from tests.helpers.ranks import run_ranks
from tests.helpers.scenarios import check, run_scenarios_on_rank

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

WAYS = [Way('positional', 'call'), Way('parallel', 'run', 2), Way('stream', 'async')]
HEADER = b'a header'
NBYTES = 5_000_001


def on_disks(disks: Disks, scenarios: dict[str, Any]) -> Any:
    """Runs on: all ranks, with ``init=None``."""
    disks.enter()
    import deepspeed

    deepspeed.init_distributed(dist_backend='gloo')
    return run_scenarios_on_rank(scenarios)


def reserve(folder: Path) -> dict[str, Any]:
    """A file of a known size, and one that is larger than the disk. Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks.writers.output_file import create_file

    if dist.get_rank() != 0:
        return {}
    path = folder / 'reserved'
    create_file(path, HEADER, NBYTES)
    about, content = path.stat(), path.read_bytes()
    try:
        create_file(folder / 'too_large', HEADER, 2**40)
        number = 0
    except OSError as error:
        number = error.errno
    (folder / 'too_large').unlink(missing_ok=True)
    return {'nbytes': about.st_size, 'room': about.st_blocks * 512, 'content': content, 'too_large': number}


def swap(folder: Path) -> tuple[bool, str, str]:
    """Two folders change their names. Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks.places.kept_folder import exchange

    if dist.get_rank() != 0:
        return False, '', ''
    for name in ('a', 'b'):
        (folder / name).mkdir()
        (folder / name / 'file').write_text(name)
    swapped = exchange(folder / 'a', folder / 'b')
    return swapped, (folder / 'a' / 'file').read_text(), (folder / 'b' / 'file').read_text()


def lock_twice(folder: Path) -> list[bool]:
    """Rank 1 asks for the lock while rank 0 has it, and when it has not. Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks.places.lock import RunLock

    lock, got = RunLock(folder / NAME), []
    for turn in ((0, 1), (1,)):
        for rank in turn:
            if dist.get_rank() == rank:
                got.append(lock.acquire())
            dist.barrier()
        if dist.get_rank() == 0:
            lock.release()
        dist.barrier()
    lock.release()
    return got


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    with loop_mounts(tmp_path_factory.mktemp('disks')) as disks:
        todo: dict[str, Any] = {}
        for kind in sorted(set(KINDS) - set(disks.missing)):
            for name, function in (('reserve', reserve), ('swap', swap), ('lock', lock_twice)):
                todo[f'{kind} {name}'] = partial(function, folder(disks, kind, name))
            for way in WAYS:
                todo[f'{kind} {way}'] = partial(
                    saves.save_in_a_row, way, folder(disks, kind, str(way)), disks, range(1, 3)
                )
        per_rank = run_ranks(on_disks, 2, disks, todo, init=None)
    return disks, {name: [outcomes[name] for outcomes in per_rank] for name in todo}


def folder(disks: Disks, kind: str, name: str) -> Path:
    disks.sees(disks.root / kind / name).mkdir()
    return disks.root / kind / name


def values(finished: Any, kind: str, name: str) -> list[Any]:
    disks, results = finished
    if kind in disks.missing:
        pytest.skip(f'{NOT_TESTED}saves on {kind}: {disks.missing[kind]}')
    return check(results, f'{kind} {name}')


@pytest.mark.parametrize('way', WAYS, ids=str)
@pytest.mark.parametrize('kind', KINDS)
def test_two_saves_in_a_row(finished, kind, way):
    seen = values(finished, kind, str(way))[0]
    assert [(one.number, one.damage, one.leftovers) for one in seen] == [(1, [], []), (2, [], []), (2, [], [])]
    assert seen[-1].folders == {NAME: 2} | {f'{NAME}_iter_1': 1 for _ in range(way.max_keep - 1)}


@pytest.mark.parametrize('kind', KINDS)
def test_a_file_has_its_room_before_it_is_written(finished, kind):
    found = values(finished, kind, 'reserve')[0]
    assert found['content'] == HEADER + bytes(NBYTES - len(HEADER))
    assert found['nbytes'] == NBYTES <= found['room']
    assert found['too_large'] in (errno.ENOSPC, errno.EFBIG), os.strerror(found['too_large'])


@pytest.mark.parametrize('kind', KINDS)
def test_folders_are_exchanged_in_one_step(finished, kind):
    assert values(finished, kind, 'swap')[0] == (True, 'b', 'a')


@pytest.mark.parametrize('kind', KINDS)
def test_a_lock_is_seen_by_another_process(finished, kind):
    assert values(finished, kind, 'lock') == [[True], [False, True]]
