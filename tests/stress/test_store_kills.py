"""``out_dir='s3://...'``, killed at every request: who follows the pointer finds the save before or this one, whole."""

from __future__ import annotations

import itertools
import shutil

import pytest

from tests.helpers.s3_servers import CREDENTIALS, s3_server
from tests.helpers.store_kills import URL, WORLD_SIZE, Strike, live, newest_step

pytestmark = pytest.mark.modern_only


@pytest.fixture
def credentials(monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


#: In turns: each request sees one of them. Before it is sent or after its answer; all ranks or the one that asked.
_HOW = [(True, True), (False, False), (True, False), (False, True)]


def test_killed_at_every_request(tmp_path, credentials):
    from xhf_hooks.places.objects import open_store

    with s3_server('moto', tmp_path) as server:
        args = server.backend_args
        live(tmp_path, args, 1, None)
        assert newest_step(args, tmp_path / 'read') == 1
        step, found = 1, [1]
        for rank in range(WORLD_SIZE):
            for number in itertools.count(1):  # a run after a killed one has more to do than the first
                step += 1
                counts = live(tmp_path, args, step, Strike(rank, number, *_HOW[step % len(_HOW)]))
                found.append(newest_step(args, tmp_path / 'read'))
                assert found[-1] in (found[-2], step), f'rank {rank} at its request {number}'
                shutil.rmtree(tmp_path / 'read')
                if counts[rank] >= 0:  # it has ended before
                    break
            assert found[-1] == step
        assert WORLD_SIZE + 1 < len({*found}) < len(found), (
            'no run was killed after its save was visible, or none before'
        )
        live(tmp_path, args, step + 1, None)
        assert newest_step(args, tmp_path / 'read') == step + 1
        store = open_store(URL, args)
        there = {path.rpartition('killed/')[2].partition('/')[0] for path in store._fs.find(store._root)}
        assert there - {'.xhf_probe'} == {'hf_model.json', f'hf_model_iter_{step + 1}'}
