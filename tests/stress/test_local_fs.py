"""The same saves on ext4, XFS, Btrfs and tmpfs."""

from __future__ import annotations

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

WAYS = [Way('positional', 'call'), Way('parallel', 'run', 2), Way('stream', 'async')]


def on_disks(disks: Disks, scenarios: dict[str, Any]) -> Any:
    """Runs on: all ranks, with ``init=None``."""
    disks.enter()
    import deepspeed

    deepspeed.init_distributed(dist_backend='gloo')
    return run_scenarios_on_rank(scenarios)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    with loop_mounts(tmp_path_factory.mktemp('disks')) as disks:
        todo: dict[str, Any] = {}
        for kind in sorted(set(KINDS) - set(disks.missing)):
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
