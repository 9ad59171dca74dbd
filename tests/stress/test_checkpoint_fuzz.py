"""Mutated files of DeepSpeed: each is refused by an error of ours, or read as what it then says; nothing else."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import pytest
import torch

from tests.helpers.made_checkpoint import MadeCheckpoint
from tests.helpers.mutate import mutated_bytes
from tests.helpers.read_checkpoint import open_checkpoint, read_all
from xhf_hooks.errors import XhfError

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

N_EACH = 120
FILES = {
    1: ('mp_rank_00_model_states.pt', 'zero_pp_rank_1_mp_rank_00_optim_states.pt'),
    3: ('zero_pp_rank_1_mp_rank_00_model_states.pt', 'zero_pp_rank_1_mp_rank_00_optim_states.pt'),
}


def outcome(folder: Path) -> str:
    """Refused, or read; then every tensor has as many elements as its shape says."""
    try:
        found = read_all(open_checkpoint(folder))
    except XhfError as error:
        assert '\n' not in str(error)
        return 'refused'
    assert all(tensor.numel() == math.prod(tensor.shape) for tensor in found.values())
    return 'read'


@pytest.mark.parametrize(('stage', 'name'), [(stage, name) for stage, names in FILES.items() for name in names])
def test_mutated(tmp_path, stage, name):
    frozen = {'frozen': torch.ones(6, 2).half()}
    folder = MadeCheckpoint(stage=stage, frozen=frozen).write(tmp_path / 'global_step5')
    original = tmp_path / 'original'
    original.write_bytes((folder / name).read_bytes())
    assert outcome(folder) == 'read'
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = []
    for number in range(N_EACH):
        (folder / name).write_bytes(mutated_bytes(original.read_bytes(), number))
        outcomes.append(outcome(folder))
    assert outcomes.count('refused') > N_EACH / 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kb < 200_000
