"""Ranks that do not see one file system: rank 0 writes, and a complete folder is where rank 0 is."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.compare import assert_loads_clean
from tests.helpers.ranks import run_ranks

CLONE_NEWNS = 0x20000


def run_on_another_disk(work_dir: Path, writers: list[str]) -> list[tuple[str, list[str]]]:
    """Rank 1 has a disk of its own mounted where the run's folder is. Runs on: all ranks.

    Returns:
        For each writer the log_dir, and what this rank sees in it.
    """
    from tests.helpers.toy_run import run_config, train

    if os.environ['RANK'] == '1':
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), 'unshare')
        subprocess.run(['mount', '--make-rprivate', '/'], check=True)
        subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', work_dir], check=True)
    found = []
    for writer in writers:
        hook = dict(writer=writer, interval=2, by_epoch=False)
        log_dir = Path(train(run_config(work_dir / writer, hook=hook, stage=3, max_iters=2)).log_dir)
        found.append((str(log_dir), sorted(path.name for path in log_dir.glob('hf_model/*'))))
    return found


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp('not_shared')
    writers = ['auto', 'parallel']
    first, second = run_ranks(run_on_another_disk, 2, root, writers)
    return {writer: (Path(first[i][0]), first[i][1], second[i][1]) for i, writer in enumerate(writers)}


@pytest.mark.parametrize('writer', ['auto', 'parallel'])
def test_rank_0_has_it_all(runs, writer):
    from transformers import LlamaForCausalLM

    log_dir, on_rank_0, on_rank_1 = runs[writer]
    assert 'model.safetensors' in on_rank_0 and on_rank_1 == []
    assert_loads_clean(log_dir / 'hf_model', LlamaForCausalLM)
    assert json.loads((log_dir / 'hf_model' / 'xhf_manifest.json').read_text())['writer'] == 'stream'


@pytest.mark.parametrize(('writer', 'wanted'), [('auto', 'positional'), ('parallel', 'parallel')])
def test_the_log_says_so(runs, writer, wanted):
    log_dir = runs[writer][0]
    log = (log_dir / f'{log_dir.name}.log').read_text()
    assert f'the writer is stream, not {wanted}' in log and 'Set out_dir to a folder on a shared file system' in log
