"""Files of other ranks, saves and runs are refused by what they record; what a good run records never is."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from tests.helpers.made_checkpoint import MadeCheckpoint, model3, optim, some_weights
from tests.helpers.read_checkpoint import assert_same_tensors, open_checkpoint, read_all
from xhf_hooks.errors import CheckpointError

ONE_RUN = 'not verifiable: that all files are of one run; they agree on ranks, steps and shapes, and name no run'
BY_NAME = 'not verifiable: only the file names say which rank wrote which file'
FROZEN = {'frozen': torch.randn(6, 2).half()}


@pytest.mark.parametrize(('stage', 'one', 'other'), [
    (1, optim(1), optim(2)), (3, optim(1), optim(2)), (3, model3(0), model3(1)),
])  # fmt: skip
def test_a_renamed_file_is_refused_by_both_its_names(tmp_path, stage, one, other):
    folder = MadeCheckpoint(stage=stage, world_size=3, frozen=FROZEN).write(tmp_path / 'x')
    folder = folder.rename(tmp_path / 'another name')  # of the folder: nobody minds
    open_checkpoint(folder)
    for old, new in ((one, 'x'), (other, one), ('x', other)):
        (folder / old).rename(folder / new)
    with pytest.raises(CheckpointError, match=re.escape(f'{folder / one}: was saved as {other} and renamed')):
        open_checkpoint(folder)


@pytest.mark.parametrize('old_format', [False, True])
@pytest.mark.parametrize('stage', [1, 3])
def test_files_without_a_name_are_read_and_told_of(tmp_path, stage, old_format):
    """torch.save to a stream, to a path that is not ASCII, or in the older format."""
    made = MadeCheckpoint(stage=stage, world_size=3)
    folder = made.write(tmp_path / 'läuft')
    if old_format:
        for file in folder.iterdir():
            torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)
    source = open_checkpoint(folder)
    assert source.unproven == (ONE_RUN, BY_NAME)
    assert_same_tensors(read_all(source), made.as_trained)
    assert open_checkpoint(made.write(tmp_path / 'x')).unproven == (ONE_RUN,)


@pytest.mark.parametrize('stage', [1, 3])
def test_one_rank_of_another_run_of_as_many_steps(tmp_path, stage):
    """No file tells; the user is told what could not be checked."""
    made = MadeCheckpoint(stage=stage, world_size=2)
    folder = made.write(tmp_path / 'x')
    other = MadeCheckpoint(stage=stage, world_size=2, masters=some_weights(seed=1)).write(tmp_path / 'other')
    shutil.copy(other / optim(1), folder)
    source = open_checkpoint(folder)
    assert source.unproven == (ONE_RUN,)
    found = read_all(source, use_fp32_master=True)
    assert any(not torch.equal(tensor, made.masters[name]) for name, tensor in found.items())


@pytest.mark.parametrize('stage', [1, 3])
def test_optimizer_files_of_an_earlier_step_are_told_of(tmp_path, stage):
    """A run that was resumed without optimizer state (``load_optimizer_states=False``) has the same files."""
    folder = MadeCheckpoint(stage=stage, step=9, skipped=2).write(tmp_path / 'x')
    assert open_checkpoint(folder).unproven == (ONE_RUN,)
    earlier = MadeCheckpoint(stage=stage, step=5, masters=some_weights(seed=1))
    for file in earlier.write(tmp_path / 'earlier').glob('*optim_states.pt'):
        shutil.copy(file, folder)
    source = open_checkpoint(folder)
    assert f'the optimizer of {optim(0)} has made 5 steps, ' in source.unproven[-1]
    assert source.unproven[-1].endswith('otherwise put the files of one save together')
    assert_same_tensors(read_all(source, use_fp32_master=True), dict(earlier.masters))
