"""The same saves, and what a command sees of them, on ext4, XFS, Btrfs and tmpfs."""

import contextlib
import logging
import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.faults import network_saves as saves
from tests.helpers.faults.network_saves import Way
from tests.helpers.faults.numbered import NAME
from tests.helpers.ranks.launch import HANG_SECS
from tests.helpers.ranks.processes import environment
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.tiny_checkpoint import commit_one, content, iteration
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.runs.ends.on_saved import OnSaved
from xhf_hooks.runs.telemetry import RunLog

pytestmark = pytest.mark.needs('root', 'xfsprogs and btrfs-progs')

#: Kinds and their sizes in MB, the minimum for XFS and Btrfs.
KINDS = {'ext4': 64, 'xfs': 320, 'btrfs': 128, 'tmpfs': 64}
#: Kinds where files can share blocks.
CLONES = {'xfs', 'btrfs'}
WAYS = [Way('positional', 'call'), Way('parallel', 'run', 2), Way('stream', 'async')]


def mount(kind: str, folder: Path) -> None:
    """Make and mount a file system."""
    folder.mkdir()
    disk = folder.with_suffix('.disk')
    command = f'truncate -s {KINDS[kind]}M {disk} && mkfs.{kind} -q {disk} && mount -o loop {disk} {folder}'
    if kind == 'tmpfs':
        command = f'mount -t tmpfs -o size={KINDS[kind]}m tmpfs {folder}'
    subprocess.run(command, shell=True, env=environment(), check=True)


@pytest.fixture(scope='module')
def disks(tmp_path_factory):
    """Their folder."""
    root = tmp_path_factory.mktemp('disks')
    with contextlib.ExitStack() as mounted:
        for kind in KINDS:
            mount(kind, root / kind)
            mounted.callback(subprocess.run, ['umount', root / kind], check=True)
        yield root


@pytest.fixture(scope='module')
def finished(disks):
    todo = {}
    for kind in KINDS:
        for way in WAYS:
            os.mkdir(disks / kind / str(way))
            todo[f'{kind} {way}'] = partial(saves.save_in_a_row, way, disks / kind / str(way), range(1, 3))
    return run_scenarios(todo, 2)


@pytest.mark.parametrize('way', WAYS, ids=str)
@pytest.mark.parametrize('kind', KINDS)
def test_two_saves_in_a_row(finished, kind, way):
    older = {f'{NAME}_iter_1': 1} if way.max_keep == 2 else {}
    assert check(finished, f'{kind} {way}')[0] == [{NAME: 1}, {NAME: 2, **older}, {NAME: 2, **older}]


@pytest.mark.parametrize('kind', CLONES)
def test_a_command_of_root_empties_a_file_of_its_own(disks, kind, caplog):
    """Where files can be cloned. Elsewhere it would be that of the save, which the page says."""
    name = 'model-00002-of-00003.safetensors'
    folder = CheckpointFolder(disks / kind / 'on_saved' / NAME, 1)
    folder.lock_and_recover()
    after = OnSaved(['truncate', '--size=0', f'{{path}}/{name}'], RunLog(logging.getLogger('test'), 'test')).start()
    commit_one(folder, 1)
    after.handle_commit(folder, iteration(1))
    assert after.wait(HANG_SECS)
    after.close()
    folder.unlock()
    assert content(folder.path) == 1
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == []
