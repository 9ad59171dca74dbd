"""Two nodes of two ranks each, with a disk for each: node 0 has it all, and the log says why."""

import json
import os
import subprocess
import time
from pathlib import Path

import deepspeed
import pytest
from transformers import LlamaForCausalLM

from tests.helpers.checks.compare import assert_loads_clean
from tests.helpers.ranks import namespaces
from tests.helpers.ranks.launch import run_ranks
from tests.helpers.runs.toy_run import run_config, train

RANKS_PER_NODE = 2


def train_on_two_nodes(root: Path) -> tuple[str, list[str]]:
    """The log_dir, and what this rank sees in its ``hf_model``. Runs on: all ranks."""
    node, local_rank = divmod(int(os.environ['RANK']), RANKS_PER_NODE)
    os.environ |= {'LOCAL_RANK': str(local_rank), 'LOCAL_WORLD_SIZE': str(RANKS_PER_NODE)}
    os.environ |= {'GROUP_RANK': str(node), 'NODE_RANK': str(node)}
    if node == 1:
        mount_own_disk(root / 'runs', root / 'meeting')
    deepspeed.init_distributed(dist_backend='gloo')
    hook = dict(interval=2, by_epoch=False)
    log_dir = Path(train(run_config(root / 'runs' / 'run', hook=hook, stage=3, max_iters=2)).log_dir)
    return str(log_dir), [path.name for path in log_dir.glob('hf_model/*')]


def mount_own_disk(folder: Path, meeting: Path) -> None:
    """Mount an empty file system at ``folder``, only for the ranks of this node, which meet through a file."""
    if os.environ['LOCAL_RANK'] == '0':
        namespaces.leave_mounts()
        subprocess.run(['mount', '--make-rprivate', '/'], check=True)
        subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', folder], check=True)
        meeting.with_suffix('.tmp').write_text(str(os.getpid()))
        meeting.with_suffix('.tmp').rename(meeting)
        return
    deadline = time.monotonic() + 600  # for a busy machine
    while not meeting.exists():
        assert time.monotonic() < deadline, f'{meeting} did not appear'
        time.sleep(0.02)
    namespaces.enter(int(meeting.read_text()), 'mnt')


@pytest.mark.needs('root')
def test_on_separate_file_systems_node_0_has_it_all_and_the_log_says_why(tmp_path):
    (tmp_path / 'runs').mkdir()
    ranks = run_ranks(train_on_two_nodes, 2 * RANKS_PER_NODE, tmp_path, init=None)
    assert [bool(files) for _, files in ranks] == [True, True, False, False]
    log_dir = Path(ranks[0][0])
    assert_loads_clean(log_dir / 'hf_model', LlamaForCausalLM)
    assert json.loads((log_dir / 'hf_model' / 'xhf_manifest.json').read_text())['writer'] == 'stream'
    log = (log_dir / f'{log_dir.name}.log').read_text()
    assert 'the writer is stream, not positional' in log and 'set out_dir to a folder on a shared file system' in log
