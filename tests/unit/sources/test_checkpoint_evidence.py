"""What no file can tell is told; test_checkpoint_source mixes the files of real runs."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.helpers.checks.read_checkpoint import assert_same_tensors, open_checkpoint, read_all
from tests.helpers.runs.made_checkpoint import MadeCheckpoint, optim, some_weights

ONE_RUN = 'not verifiable: that all files are of one run; they agree on ranks, steps and shapes, and name no run'
BY_NAME = 'not verifiable: only the file names say which rank wrote which file'


@pytest.mark.parametrize('stage', [1, 3])
def test_files_without_a_name_are_read_and_told_of(tmp_path, stage):
    """torch.save to a path that is not ASCII; test_evidence has them of a stream."""
    made = MadeCheckpoint(stage=stage, world_size=3)
    folder = made.write(tmp_path / 'läuft')
    source = open_checkpoint(folder)
    assert source.unproven == (ONE_RUN, BY_NAME)
    assert_same_tensors(read_all(source), made.as_trained)
    assert open_checkpoint(made.write(tmp_path / 'x')).unproven == (ONE_RUN,)


@pytest.mark.parametrize('stage', [1, 3])
def test_one_rank_of_another_run_of_as_many_steps(tmp_path, stage):
    """No file tells; the user is told what could not be checked. That steps were skipped is no sign of other files."""
    made = MadeCheckpoint(stage=stage, step=9, skipped=2)
    folder = made.write(tmp_path / 'x')
    other = MadeCheckpoint(stage=stage, step=9, skipped=2, masters=some_weights(seed=1)).write(tmp_path / 'other')
    shutil.copy(other / optim(1), folder)
    source = open_checkpoint(folder)
    assert source.unproven == (ONE_RUN,)
    found = read_all(source, from_master=True)
    assert any(not torch.equal(tensor, made.masters[name]) for name, tensor in found.items())
