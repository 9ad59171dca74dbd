"""Files of other ranks, saves and runs are refused by what they record; what a good run records never is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.made_checkpoint import MadeCheckpoint, some_weights
from tests.helpers.read_checkpoint import assert_same_tensors, open_checkpoint, read_all
from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint import CheckpointSource, find_checkpoint

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

ONE_RUN = 'not verifiable: that all files are of one run; they agree on ranks, steps and shapes, and name no run'
BY_NAME = 'not verifiable: only the file names say which rank wrote which file'
MODEL = 'mp_rank_00_model_states.pt'
FROZEN = {'frozen': torch.randn(6, 2).half()}


def optim(rank: int) -> str:
    return f'zero_pp_rank_{rank}_mp_rank_00_optim_states.pt'


def model3(rank: int) -> str:
    return f'zero_pp_rank_{rank}_mp_rank_00_model_states.pt'


def swap(folder: Path, one: str, other: str) -> None:
    (folder / one).rename(folder / 'x')
    (folder / other).rename(folder / one)
    (folder / 'x').rename(folder / other)


def edit(folder: Path, pattern: str, change: Callable[[dict[str, Any]], Any], *, nameless: bool = False) -> None:
    """Load and save files, as a script of a user might."""
    for file in folder.glob(pattern):
        state = torch.load(file, weights_only=False)
        change(state)
        if nameless:
            with file.open('wb') as stream:
                torch.save(state, stream)
        else:
            torch.save(state, file)


def forget_names(folder: Path) -> None:
    edit(folder, '*.pt', lambda state: None, nameless=True)


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointSource(find_checkpoint(folder), **options)
    assert '\n' not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(('stage', 'one', 'other'), [
    (1, optim(1), optim(2)), (3, optim(1), optim(2)), (3, model3(0), model3(1)),
])  # fmt: skip
def test_a_renamed_file_is_refused_by_both_its_names(tmp_path, stage, one, other):
    folder = MadeCheckpoint(stage=stage, world_size=3, frozen=FROZEN).write(tmp_path / 'x')
    folder = folder.rename(tmp_path / 'another name')  # of the folder: nobody minds
    open_checkpoint(folder)
    swap(folder, one, other)
    assert f'{folder / one}: was saved as {other} and renamed' in refusal(folder)


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


def other_run(folder: Path, name: str, **options: Any) -> Path:
    other = MadeCheckpoint(**options).write(folder.parent / 'other')
    shutil.copy(other / name, folder / name)
    return folder


@pytest.mark.parametrize('stage', [1, 3])
def test_one_rank_of_another_run_of_as_many_steps(tmp_path, stage):
    """No file tells; the user is told what could not be checked."""
    made = MadeCheckpoint(stage=stage, world_size=2)
    folder = other_run(made.write(tmp_path / 'x'), optim(1), stage=stage, world_size=2, masters=some_weights(seed=1))
    source = open_checkpoint(folder)
    assert source.unproven == (ONE_RUN,)
    found = read_all(source, use_fp32_master=True)
    assert any(not torch.equal(tensor, made.masters[name]) for name, tensor in found.items())


def test_optimizer_files_of_an_earlier_step(tmp_path):
    """At ZeRO-3 all weights are in them, and counts alone tell."""
    folder = MadeCheckpoint(stage=3, step=9).write(tmp_path / 'x')
    earlier = MadeCheckpoint(stage=3, step=5).write(tmp_path / 'earlier')
    for rank in (0, 1):
        shutil.copy(earlier / optim(rank), folder / optim(rank))
    message = refusal(folder)
    assert 'its optimizer has made 5 steps' in message and 'step 9' in message and '--optimizer-restarted' in message


GOOD = {
    'fp16 with overflows': dict(skipped=2),
    'nothing but overflows': dict(skipped=5),
    "MMEngine's load_from": dict(step=500, optimizer_step=20, meta={'iter': 20, 'epoch': 0}),
    "MMEngine's load_from with overflows": dict(step=500, skipped=3, optimizer_step=18, meta={'iter': 20}),
    'resumed by MMEngine': dict(step=500, meta={'iter': 500}),
}


@pytest.mark.parametrize('stage', [1, 3])
@pytest.mark.parametrize('name', GOOD)
def test_good_counts(tmp_path, stage, name):
    made = MadeCheckpoint(stage=stage, **GOOD[name])
    assert_same_tensors(read_all(open_checkpoint(made.write(tmp_path / 'x')), use_fp32_master=True), dict(made.masters))


def test_accumulated_gradients_after_load_from(tmp_path):
    made = MadeCheckpoint(stage=3, step=130, optimizer_step=5, meta={'iter': 23})
    folder = made.write(tmp_path / 'x')
    assert 'has made 5 steps' in refusal(folder)
    edit(folder, '*.pt', lambda state: state['ds_config'].update(gradient_accumulation_steps=4))
    open_checkpoint(folder)


def test_a_run_that_was_resumed_without_its_optimizer(tmp_path):
    """Legal in plain DeepSpeed (``load_optimizer_states=False``), and the same as files of an earlier step."""
    for stage in (1, 2):  # where the model file has the weights
        made = MadeCheckpoint(stage=stage, step=9, optimizer_step=2)
        assert_same_tensors(read_all(open_checkpoint(made.write(tmp_path / f'{stage}'))), made.as_trained)
    made = MadeCheckpoint(stage=3, step=9, optimizer_step=2)
    folder = made.write(tmp_path / '3')
    refusal(folder)
    source = CheckpointSource(find_checkpoint(folder), optimizer_restarted=True)
    assert_same_tensors(read_all(source), made.as_trained)


@pytest.mark.parametrize('stage', [1, 3])
def test_what_is_not_recorded_is_no_error_but_told(tmp_path, stage):
    made = MadeCheckpoint(stage=stage, world_size=2)
    folder = made.write(tmp_path / 'x')

    def forget(state: dict[str, Any]) -> None:
        del state['ds_config']
        if 'optimizer_state_dict' in state:
            base = state['optimizer_state_dict']['optimizer_state_dict' if stage == 3 else 'base_optimizer_state']
            base['state'] = {}

    edit(folder, '*.pt', forget)
    source = open_checkpoint(folder)
    assert_same_tensors(read_all(source), made.as_trained)
    assert 'the iteration of the fp32 master weights' in source.unproven[-1]
