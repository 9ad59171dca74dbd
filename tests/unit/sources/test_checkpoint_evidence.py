"""Files of other ranks, saves and runs are refused by what they record; what a good run records never is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.made_checkpoint import MadeCheckpoint, some_weights
from tests.helpers.read_checkpoint import assert_same_tensors, open_checkpoint, read_all
from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint import CheckpointSource, find_checkpoint

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

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


@pytest.mark.parametrize('stage', [1, 2, 3])
def test_a_renamed_file_is_refused_by_both_its_names(tmp_path, stage):
    folder = MadeCheckpoint(stage=stage, world_size=3).write(tmp_path / 'x')
    folder = folder.rename(tmp_path / 'another name')  # of the folder: nobody minds
    open_checkpoint(folder)
    swap(folder, optim(1), optim(2))
    assert f'{folder / optim(1)}: was saved as {optim(2)} and renamed' in refusal(folder)


def test_a_renamed_model_file_is_refused(tmp_path):
    folder = MadeCheckpoint(stage=3, world_size=2, frozen=FROZEN).write(tmp_path / 'x')
    swap(folder, model3(0), model3(1))
    assert f'{folder / model3(0)}: was saved as {model3(1)} and renamed' in refusal(folder)


@pytest.mark.parametrize('old_format', [False, True])
@pytest.mark.parametrize('stage', [1, 2, 3])
def test_files_without_a_name_are_read_and_told_of(tmp_path, stage, old_format):
    """torch.save to a stream, to a path that is not ASCII, or in the older format."""
    made = MadeCheckpoint(stage=stage, world_size=3)
    folder = made.write(tmp_path / 'läuft')
    if old_format:
        for file in folder.iterdir():
            torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)
    source = open_checkpoint(folder)
    assert source.unproven == (() if stage < 3 else (BY_NAME,))
    assert_same_tensors(read_all(source), made.as_trained)
    assert open_checkpoint(made.write(tmp_path / 'x')).unproven == ()


@pytest.mark.parametrize('world_size', [2, 3, 8])
@pytest.mark.parametrize('sub_group', [10**9, 7])
def test_at_zero3_padding_tells_the_last_rank(tmp_path, world_size, sub_group):
    made = MadeCheckpoint(stage=3, world_size=world_size, sub_group=sub_group)
    folder = made.write(tmp_path / 'x')
    forget_names(folder)
    assert_same_tensors(read_all(open_checkpoint(folder)), made.as_trained)
    swap(folder, optim(0), optim(world_size - 1))
    assert 'has that of this rank: they are swapped' in refusal(folder)


def test_at_zero3_a_padding_that_proves_nothing_is_no_error(tmp_path):
    """Moments of L2 regularisation, of memory that was never set, and of no gradient at all."""
    folder = MadeCheckpoint(stage=3, world_size=2).write(tmp_path / 'x')

    def fill(state: dict[str, Any], value: float) -> None:
        for entry in state['optimizer_state_dict']['optimizer_state_dict']['state'].values():
            entry['exp_avg_sq'].fill_(value)

    for value in (88.0, 0.0):
        edit(folder, '*optim_states.pt', partial(fill, value=value), nameless=True)
        read_all(open_checkpoint(folder))


def test_rank_0_alone_lists_what_is_tied(tmp_path):
    made = MadeCheckpoint(stage=3, shared={'head.alias': 'embed.weight'}, frozen=FROZEN)
    folder = made.write(tmp_path / 'x')
    edit(folder, model3(1), lambda state: state['shared_params'].clear())
    forget_names(folder)
    open_checkpoint(folder)
    swap(folder, model3(0), model3(1))
    assert f'{model3(1)}: is the file of rank 0' in refusal(folder)


@pytest.mark.parametrize('stage', [1, 2])
@pytest.mark.parametrize('groups', [None, 'two'])
def test_slices_that_a_rank_records(tmp_path, stage, groups):
    """Where the model file lacks the weights, nothing else tells."""
    names = list(some_weights())
    made = MadeCheckpoint(stage=stage, world_size=3, groups=groups and [names[:2], names[2:]])
    folder = made.write(tmp_path / 'x')
    forget_names(folder)
    edit(folder, MODEL, lambda state: state['module'].clear(), nameless=True)
    assert_same_tensors(read_all(open_checkpoint(folder), use_fp32_master=True), dict(made.masters))
    swap(folder, optim(0), optim(1))
    assert 'holds another part of' in refusal(folder)


def other_run(folder: Path, name: str, **options: Any) -> Path:
    other = MadeCheckpoint(**options).write(folder.parent / 'other')
    shutil.copy(other / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        ({'lr': 2e-3}, 'settings of the optimizer'),
        ({'skipped': 1, 'optimizer_step': 5}, 'state of the loss scaler'),
        ({'dtype': torch.bfloat16}, 'fp16.enabled in ds_config False'),
        ({'optimizer_step': 4}, 'optimizer step 4'),
    ],
)
@pytest.mark.parametrize('stage', [1, 3])
def test_one_rank_of_another_run(tmp_path, stage, options, words):
    folder = MadeCheckpoint(stage=stage, world_size=2).write(tmp_path / 'x')
    message = refusal(other_run(folder, optim(1), stage=stage, world_size=2, **options))
    assert words in message and f'{folder / optim(1)}: has' in message


def test_model_and_optimizer_files_of_other_configs(tmp_path):
    folder = MadeCheckpoint(stage=3).write(tmp_path / 'x')
    edit(folder, '*optim_states.pt', lambda state: state['ds_config'].update(gradient_clipping=0.5))
    assert 'gradient_clipping in ds_config' in refusal(folder)


def test_every_count_is_compared(tmp_path):
    folder = MadeCheckpoint(stage=3, sub_group=20).write(tmp_path / 'x')
    edit(
        folder, optim(1), lambda s: s['optimizer_state_dict']['optimizer_state_dict']['state'][2].update(step=3)
    )  # fmt: skip
    assert 'other numbers of optimizer steps' in refusal(folder)


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


@pytest.mark.parametrize('stage', [1, 2, 3])
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
    for stage in (1, 2):  # where the weights themselves are compared
        made = MadeCheckpoint(stage=stage, step=9, optimizer_step=2)
        assert_same_tensors(read_all(open_checkpoint(made.write(tmp_path / f'{stage}'))), made.as_trained)
    made = MadeCheckpoint(stage=3, step=9, optimizer_step=2)
    folder = made.write(tmp_path / '3')
    refusal(folder)
    source = CheckpointSource(find_checkpoint(folder), optimizer_restarted=True)
    assert_same_tensors(read_all(source), made.as_trained)


@pytest.mark.parametrize('spoil', ['no counts', 'no settings', 'an optimizer without state', 'sums of one rank'])
@pytest.mark.parametrize('stage', [1, 3])
def test_what_is_not_recorded_is_no_error(tmp_path, stage, spoil):
    made = MadeCheckpoint(stage=stage, world_size=2)
    folder = made.write(tmp_path / 'x')

    def change(state: dict[str, Any]) -> None:
        if 'optimizer_state_dict' not in state:
            return
        zero = state['optimizer_state_dict']
        base = zero['optimizer_state_dict' if stage == 3 else 'base_optimizer_state']
        if spoil == 'no counts':
            for entry in base['state'].values():
                del entry['step']
        elif spoil == 'no settings':
            del base['param_groups'], zero['loss_scaler'], state['ds_config']
        elif spoil == 'an optimizer without state':
            base['state'] = {}
        else:  # as D-Adaptation's
            base['param_groups'][0]['d_numerator'] = torch.rand(())

    edit(folder, '*.pt', change)
    assert_same_tensors(read_all(open_checkpoint(folder)), made.as_trained)


def test_an_optimizer_that_counts_no_steps(tmp_path):
    """At ZeRO-3 the user is told; elsewhere the weights themselves tell."""
    for stage in (1, 3):
        folder = MadeCheckpoint(stage=stage).write(tmp_path / f'{stage}')
        edit(
            folder,
            '*optim_states.pt',
            lambda s, stage=stage: s['optimizer_state_dict'].update(
                {
                    'optimizer_state_dict' if stage == 3 else 'base_optimizer_state': {
                        'state': {0: {}},
                        'param_groups': [],
                    }
                }
            ),
        )
        source = open_checkpoint(folder)
        assert [line for line in source.unproven if 'counts no steps' in line] == list(source.unproven)
        assert bool(source.unproven) == (stage == 3)


@pytest.mark.parametrize('stage', [1, 2])
def test_of_fp32_training_the_optimizer_has_the_same_weights(tmp_path, stage):
    made = MadeCheckpoint(stage=stage, dtype=torch.float32)
    folder = made.write(tmp_path / 'x')
    assert_same_tensors(read_all(open_checkpoint(folder)), made.as_trained)
    edit(folder, MODEL, lambda state: state['module']['b.weight'].mul_(1.001))
    assert 'b.weight is not what mp_rank_00_model_states.pt says' in refusal(folder)


def large(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(numel, generator=generator) for name, numel in (('a', 300_000), ('b', 7), ('c', 40_000))}


@pytest.mark.parametrize('world_size', [2, 3, 8])
def test_every_ranks_part_of_every_tensor_is_looked_at(tmp_path, world_size):
    """Where one tensor spans all ranks, and its start is right."""
    made = MadeCheckpoint(masters=large(), stage=1, world_size=world_size, dtype=torch.bfloat16)
    folder = made.write(tmp_path / 'x')
    forget_names(folder)
    edit(
        folder, '*optim_states.pt', lambda s: s['optimizer_state_dict'].pop('param_slice_mappings'), nameless=True
    )  # fmt: skip
    assert_same_tensors(read_all(open_checkpoint(folder), use_fp32_master=True), dict(made.masters))
    other = MadeCheckpoint(masters=large(1), stage=1, world_size=world_size, dtype=torch.bfloat16)
    for rank in range(world_size):
        spoilt = shutil.copytree(folder, tmp_path / f'rank {rank}')
        shutil.copy(other.write(tmp_path / f'other {rank}') / optim(rank), spoilt / optim(rank))
        assert f'{spoilt / optim(rank)}: ' in refusal(spoilt) and MODEL in refusal(spoilt)


def test_all_that_is_read_is_compared(tmp_path):
    """One number in a place that nothing looks at when the checkpoint is opened."""
    made = MadeCheckpoint(masters=large(), stage=1, world_size=2, dtype=torch.bfloat16)
    folder = made.write(tmp_path / 'x')

    def change(state: dict[str, Any]) -> None:
        state['optimizer_state_dict']['single_partition_of_fp32_groups'][0][90_000] *= 1.01

    edit(folder, optim(1), change)
    source = open_checkpoint(folder)
    assert_same_tensors(read_all(source), made.as_trained)
    with pytest.raises(CheckpointError, match='a is not what mp_rank_00_model_states') as caught:
        read_all(source, use_fp32_master=True)
    assert str(folder / optim(1)) in str(caught.value)
    out = torch.empty(1000)
    data = memoryview(out.view(torch.uint8).numpy())
    assert source.read_into('a', 200_000, data, 'F32', use_fp32_master=True) == 0  # elsewhere in that tensor
    assert torch.equal(out, made.masters['a'][200_000:201_000])


def test_all_bit_patterns_are_what_they_round_to(tmp_path):
    """Not-a-numbers of any kind are alike; zeros of either sign are not."""
    special = torch.tensor([float('nan'), float('inf'), -float('inf'), -0.0, 0.0, 1e-45, 70000.0, 3.4e38, -1e-30])
    patterns = torch.arange(-(2**31), 2**31, 40_009, dtype=torch.int64).to(torch.int32).view(torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        made = MadeCheckpoint(masters={'w': torch.cat([special, patterns])}, stage=2, dtype=dtype)
        folder = made.write(tmp_path / str(dtype))

        def other_nans(state: dict[str, Any]) -> None:
            weights = state['module']['w']
            weights[weights.isnan()] = weights.view(torch.int16)[0:1].bitwise_xor(1).view(weights.dtype)

        edit(folder, MODEL, other_nans)
        assert len(read_all(open_checkpoint(folder), use_fp32_master=True, damaged=True)) == 1
        edit(folder, MODEL, lambda state: state['module']['w'][4].neg_())
        assert 'w is not what' in refusal(folder)
