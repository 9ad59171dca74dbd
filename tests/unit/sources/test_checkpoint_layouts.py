"""Every layout of DeepSpeed's files, made by hand, gives back what went in; at any number of ranks."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.helpers.checks.compare import assert_same_tensors
from tests.helpers.checks.read_checkpoint import open_checkpoint, read_all
from tests.helpers.runs.made_checkpoint import MadeCheckpoint, optim, some_weights

WEIGHTS = some_weights()
TWO_GROUPS = [[n for n, t in WEIGHTS.items() if t.ndim > 1], [n for n, t in WEIGHTS.items() if t.ndim <= 1]]
FROZEN = {'frozen.a': torch.randn(3, 3).half(), 'frozen.b': torch.randn(5).half(), 'frozen.c': torch.randn(1).half()}
BUFFERS = {
    'positions': torch.arange(5),
    'scale': torch.randn(2).half(),
    'none': torch.empty(0),
    'flag': torch.tensor(True),
}
KINDS = {
    'one_group': {},
    'two_groups': {'groups': TWO_GROUPS},
    'frozen_and_buffers': {'frozen': FROZEN, 'buffers': BUFFERS},
    'bf16': {'dtype': torch.bfloat16},
    'fp32': {'dtype': torch.float32},
}
STAGE_KINDS = {1: {'aligned': {'alignment': 8}, 'aligned_groups': {'alignment': 8, 'groups': TWO_GROUPS}}}
STAGE_KINDS[2] = STAGE_KINDS[1]
STAGE_KINDS[3] = {f'sub_groups_of_{n}': {'sub_group': n} for n in (1, 7, 20)}
CASES = [(stage, kind) for stage in (1, 2, 3) for kind in {**KINDS, **STAGE_KINDS[stage]}]


@pytest.mark.parametrize('world_size', [1, 3, 8])
@pytest.mark.parametrize(('stage', 'kind'), CASES)
def test_gives_back_what_went_in(tmp_path, stage, kind, world_size):
    options = {**KINDS, **STAGE_KINDS[stage]}[kind]
    made = MadeCheckpoint(stage=stage, world_size=world_size, **options)
    source = open_checkpoint(made.write(tmp_path / 'global_step5'))
    assert source.facts['zero_stage'] == stage and source.facts['world_size'] == world_size
    assert source.warnings == [] and source.iteration == 5
    assert_same_tensors(read_all(source), made.as_trained)
    expected = {**made.as_trained, **made.masters}
    assert_same_tensors(read_all(source, from_master=True), expected)
    has_master = [spec.name for spec in source.specs() if spec.has_master]
    assert has_master == ([] if made.dtype == torch.float32 else list(made.masters))


@pytest.mark.parametrize('stage', [1, 3])
def test_more_ranks_than_elements(tmp_path, stage):
    made = MadeCheckpoint(stage=stage, world_size=150, groups=TWO_GROUPS)
    source = open_checkpoint(made.write(tmp_path / 'x'))
    assert_same_tensors(read_all(source, from_master=True), dict(made.masters))


def test_named_but_not_stored(tmp_path):
    """Frozen parameters that a ZeRO-3 run has left out (``exclude_frozen_parameters``) are told of."""
    made = MadeCheckpoint(stage=3, frozen=FROZEN)
    folder = made.write(tmp_path / 'x')
    for file in folder.glob('*model_states.pt'):
        state = torch.load(file, weights_only=False)
        torch.save({**state, 'frozen_param_shapes': None, 'frozen_param_fragments': None}, file)
    source = open_checkpoint(folder)
    assert len(source.specs()) == len(made.masters)
    assert source.warnings == [f'3 tensors named in the checkpoint, but not stored: {", ".join(FROZEN)}']


def test_what_state_dict_leaves_out_is_in_the_masters(tmp_path):
    """XTuner's ``state_dict()`` keeps some names only; the trained rest comes from the optimizer's files."""
    made = MadeCheckpoint(stage=2, frozen=FROZEN)
    folder = made.write(tmp_path / 'x')
    file = folder / 'mp_rank_00_model_states.pt'
    state = torch.load(file, weights_only=False)
    torch.save({**state, 'module': {'b.weight': state['module']['b.weight']}}, file)
    found = read_all(open_checkpoint(folder))
    assert_same_tensors(found, made.as_trained)
    assert next(iter(found)) == 'b.weight'


@pytest.mark.parametrize('stage', [1, 3])
def test_one_rank_of_another_run_of_as_many_steps(tmp_path, stage):
    """No file tells; the user is told what could not be checked. That steps were skipped is no sign of other files."""
    made = MadeCheckpoint(stage=stage, step=9, skipped=2)
    folder = made.write(tmp_path / 'x')
    other = MadeCheckpoint(stage=stage, step=9, skipped=2, masters=some_weights(seed=1)).write(tmp_path / 'other')
    shutil.copy(other / optim(1), folder)
    source = open_checkpoint(folder)
    (told,) = source.unproven
    assert told.startswith('not verifiable: that all files are of one run')
    found = read_all(source, from_master=True)
    assert any(not torch.equal(tensor, made.masters[name]) for name, tensor in found.items())
