"""What a command is called with, and what it sees of the rank that calls it."""

from __future__ import annotations

import pytest

from xhf_hooks.config.checks import PLACEHOLDERS
from xhf_hooks.on_saved.command import fill_in
from xhf_hooks.on_saved.environment import without_ranks

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


def test_placeholders():
    values = dict(zip(PLACEHOLDERS, ['/a b/{step}', 5, 'iter_5', '/out'], strict=True))
    command = ['x', 'pretrained={path},step={step}', '{label}{label}', '{"json": 1}', '${HOME}', '{output}/{}']
    assert fill_in(command, values) == [
        *('x', 'pretrained=/a b/{step},step=5', 'iter_5iter_5', '{"json": 1}', '${HOME}', '/out/{}'),
    ]


def test_a_command_is_no_rank():
    kept = {'PATH': '/bin', 'CUDA_VISIBLE_DEVICES': '7', 'HF_HOME': '/hf', 'OMP_NUM_THREADS': '1', 'RANKING': 'x'}
    of_a_rank = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID']
    of_a_rank += ['ACCELERATE_USE_DEEPSPEED', 'OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'SLURM_PROCID', 'GROUP_RANK']
    assert without_ranks(kept | dict.fromkeys(of_a_rank, '1')) == kept
