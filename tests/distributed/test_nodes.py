"""Two nodes of two ranks each: with one file system, and with one for each."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import nodes
from tests.helpers.compare import assert_loads_clean
from tests.helpers.ranks import run_ranks

#: Options of the hook by name.
SHARED = {'auto': dict(async_save=True), 'parallel': dict(writer='parallel')}
APART = {'auto': dict()}


def train_on_two_nodes(
    names: list[str] | None, root: Path, hooks: dict[str, dict[str, Any]], apart: bool
) -> dict[str, Any]:
    """A run for each of ``hooks``. Runs on: all ranks.

    Args:
        apart: The second node has a disk of its own at ``root/runs``.

    Returns:
        For each run its log_dir, and what this rank sees in ``hf_model``; under 'network' where this rank is.
    """
    node = nodes.move_in(names)
    if apart and node == 1:
        nodes.mount_own_disk(root / 'runs', root / 'meeting')
    import deepspeed

    from tests.helpers.toy_run import run_config, train

    deepspeed.init_distributed(dist_backend='gloo')
    found: dict[str, Any] = {'network': socket.if_nameindex()}
    for name, options in hooks.items():
        hook = dict(interval=2, by_epoch=False, **options)
        log_dir = Path(train(run_config(root / 'runs' / name, hook=hook, stage=3, max_iters=2)).log_dir)
        found[name] = (str(log_dir), sorted(path.name for path in log_dir.glob('hf_model/*')))
    return found


def train_all(root: Path, hooks: dict[str, dict[str, Any]], apart: bool) -> tuple[list[str] | None, list[Any]]:
    (root / 'runs').mkdir()
    with nodes.network() as names:
        return names, run_ranks(train_on_two_nodes, 4, names, root, hooks, apart, init=None)


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
    return train_all(tmp_path_factory.mktemp('shared'), SHARED, apart=False)


@pytest.fixture(scope='module')
def apart(tmp_path_factory):
    return train_all(tmp_path_factory.mktemp('apart'), APART, apart=True)


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / 'xhf_manifest.json').read_text())


def test_the_nodes_are_two_where_the_system_allows(shared):
    names, ranks = shared
    cables = [rank['network'] for rank in ranks]
    assert cables[0] == cables[1] and cables[2] == cables[3]
    if names is not None:
        assert all({name for _, name in cable} >= {'lo', 'veth'} for cable in cables)
        assert 'veth' not in {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize('name', SHARED)
def test_on_a_shared_file_system_all_write_one_folder(shared, name):
    from transformers import LlamaForCausalLM

    _, ranks = shared
    log_dirs = {rank[name][0] for rank in ranks}
    (log_dir,) = log_dirs
    folder = Path(log_dir, 'hf_model')
    assert all(rank[name][1] == sorted(path.name for path in folder.iterdir()) for rank in ranks)
    assert_loads_clean(folder, LlamaForCausalLM)
    found = manifest(folder)
    assert (found['world_size'], found['writer']) == (4, SHARED[name].get('writer', 'positional'))


def test_all_writers_write_the_same(shared):
    _, ranks = shared
    written = {name: Path(ranks[0][name][0], 'hf_model', 'model.safetensors').read_bytes() for name in SHARED}
    assert len(set(written.values())) == 1


def test_on_separate_file_systems_node_0_has_it_all_and_the_log_says_why(apart):
    from transformers import LlamaForCausalLM

    _, ranks = apart
    assert [bool(rank['auto'][1]) for rank in ranks] == [True, True, False, False]
    log_dir = Path(ranks[0]['auto'][0])
    assert_loads_clean(log_dir / 'hf_model', LlamaForCausalLM)
    assert manifest(log_dir / 'hf_model')['writer'] == 'stream'
    log = (log_dir / f'{log_dir.name}.log').read_text()
    assert 'the writer is stream, not positional' in log and 'set out_dir to a folder on a shared file system' in log
