"""Files that shrink while they are converted: one line, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.made_checkpoint import MadeCheckpoint
from tests.helpers.ranks import run_program
from xhf_hooks.cli.convert import FAILED

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp('root')
    sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, vocab_size=20_000)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=8, **sizes))
    model.save_pretrained(folder / 'model')
    torch.save({'state_dict': model.state_dict(), 'meta': {'iter': 7}}, folder / 'iter_7.pth')
    return folder


# Cuts a file off as soon as the first block of the output is written.
SHRINK = """
import contextlib, os, sys
from xhf_hooks.cli import convert

victim = sys.argv.pop(1)
convert.progress = lambda label: contextlib.nullcontext(lambda done, total: os.truncate(victim, 100_000))
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


@pytest.mark.parametrize(('how', 'dtype'), [('file', 'keep'), ('zero3', 'float16'), ('transposed', 'keep')])
def test_a_file_that_shrinks(root, tmp_path, how, dtype):
    checkpoint, victim = save_file_of(root, tmp_path, how)
    before = sorted(path.name for path in tmp_path.iterdir())
    options = ['--workers', '1', '--base', root / 'model', '--dtype', dtype]
    (done,) = run_program(SHRINK, victim, checkpoint, tmp_path / 'out', *options)
    lines = [line for line in done.stderr.splitlines() if ' note: ' not in line]
    assert done.returncode == FAILED and len(lines) == 1, (done.returncode, done.stderr)
    assert f'{victim}: became shorter while it was read; convert a copy that no process writes to' in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == before
