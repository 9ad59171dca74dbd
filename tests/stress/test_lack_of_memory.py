"""Memory that a limit refuses, and files that shrink while they are read: one line, and nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.limited_memory import MORE_MB, make_model
from tests.helpers.made_checkpoint import MadeCheckpoint
from tests.helpers.ranks import HANG_SECS
from xhf_hooks.cli.convert import FAILED

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp('root')
    make_model(folder)
    return folder


def test_limits_of_memory(root, tmp_path):
    """Of address space, beyond what the imports take: from next to nothing to plenty."""
    command = [sys.executable, '-m', 'tests.helpers.limited_memory', str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]  # libraries print, too
    assert len(runs) == 3 * len(MORE_MB)
    for name, more_mb, status, left, said in runs:
        failed = [line for line in said if line.startswith((f'xhf-{name}: ', 'xhf-verify: ')) and ' note: ' not in line]
        assert left == [] and status in (0, 1 if name == 'convert' else 2), (name, more_mb, status, left, said)
        assert len(failed) == bool(status) and not any('Traceback' in line for line in said), (name, more_mb, said)
        assert not failed or 'memory' in failed[0]
    for name in ('convert', 'verify', 'compare'):
        statuses = [status for run, _, status, *_ in runs if run == name]
        assert statuses[0] and not statuses[-1], (name, statuses)


# Cuts a file off as soon as the first block of the output is written.
SHRINK = """
import os, sys
from xhf_hooks.cli import convert
from xhf_hooks.cli.progress import Progress

victim = sys.argv.pop(1)
Progress.__call__ = lambda self, done, total: os.truncate(victim, 100_000)
sys.exit(convert.main(sys.argv[1:]))
"""


def save_file_of(root: Path, folder: Path, how: str) -> list[Path]:
    """A checkpoint; the checkpoint's path, and the file that is to shrink."""
    content = torch.load(root / 'iter_7.pth', mmap=True)
    state = content['state_dict']
    if how == 'zero3':
        MadeCheckpoint(state, dtype=torch.bfloat16, stage=3).write(folder / 'global_step5')
        return [folder / 'global_step5', folder / 'global_step5' / 'zero_pp_rank_1_mp_rank_00_optim_states.pt']
    if how == 'transposed':
        state = {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in state.items()}
    torch.save({**content, 'state_dict': state}, folder / 'iter_7.pth')
    return [folder / 'iter_7.pth', folder / 'iter_7.pth']


@pytest.mark.parametrize('how', ['file', 'zero3', 'transposed'])
@pytest.mark.parametrize('dtype', ['keep', 'float16'])
def test_a_file_that_shrinks(root, tmp_path, how, dtype):
    checkpoint, victim = save_file_of(root, tmp_path, how)
    before = sorted(path.name for path in tmp_path.iterdir())
    command = [sys.executable, '-c', SHRINK, str(victim), str(checkpoint), str(tmp_path / 'out'), '--workers', '1']
    command += ['--base', str(root / 'model'), '--dtype', dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECS)
    lines = [line for line in done.stderr.splitlines() if ' note: ' not in line]
    assert done.returncode == FAILED and len(lines) == 1, (done.returncode, done.stderr)
    assert f'{victim}: became shorter while it was read; convert a copy that no process writes to' in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == before
