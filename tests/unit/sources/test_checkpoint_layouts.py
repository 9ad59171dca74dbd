"""Layouts of DeepSpeed's files, made by hand, give back what went in; what is wrong with one is said in one line."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checks.compare import assert_same_tensors
from tests.helpers.checks.read_checkpoint import open_checkpoint, read_all
from tests.helpers.runs.made_checkpoint import MadeCheckpoint, model3, optim, some_weights
from xhf_hooks.errors import CheckpointError

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
    assert source.manifest_fields['zero_stage'] == stage and source.manifest_fields['world_size'] == world_size
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
    assert 'Not checked: that they are of one run' in told
    found = read_all(source, from_master=True)
    assert any(not torch.equal(tensor, made.masters[name]) for name, tensor in found.items())


MODEL = 'mp_rank_00_model_states.pt'
HALF = torch.randn(6, 2).half()


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str, share: float) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def from_another(name: str, **options: Any) -> Callable[[Path], None]:
    """The file of another save in its place."""

    def put(folder: Path) -> None:
        stage = 3 if (folder / model3(0)).exists() else 1
        other = MadeCheckpoint(**{'stage': stage, 'world_size': 3, **options}).write(folder.parent / 'other')
        shutil.copy(other / name, folder / name)

    return put


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        state = torch.load(folder / name, weights_only=False)
        change(state)
        torch.save(state, folder / name)

    return put


def shapes(state: dict[str, Any], name: str, shape: tuple[int, ...]) -> None:
    state['param_shapes'][0][name] = torch.Size(shape)


FLAT = 'single_partition_of_fp32_groups'
#: Stage, what is done to the folder, the file that the message names, part of the message.
CASES: dict[str, tuple[int, Callable[[Path], Any], str, str]] = {
    'rank missing': (1, remove(optim(1)), optim(1), 'missing'),
    'model file of a rank missing': (3, remove(model3(1)), model3(1), 'missing'),
    'model file missing': (1, remove(MODEL), 'model_states.pt', 'is missing'),
    'all optimizer files missing': (3, lambda f: [remove(optim(r))(f) for r in range(3)], model3(0), 'missing; copy'),
    'truncated': (3, cut(optim(1), 0.7), optim(1), 'truncated'),
    'empty': (1, cut(optim(0), 0), optim(0), 'empty file'),
    'another world size': (1, from_another(optim(1), world_size=2), optim(1), 'number of ranks 2'),
    'a rank too many': (1, lambda f: shutil.copy(f / optim(2), f / optim(3)), optim(3), 'left over from another run'),
    'another step': (1, from_another(optim(1), step=6), optim(1), 'optimizer step 6'),
    'another model file at 3': (3, from_another(model3(2), step=6), model3(2), 'global_steps 6'),
    'another stage': (1, from_another(optim(1), stage=2), optim(1), 'ZeRO stage 2'),
    'leftovers of stage 3': (1, from_another(model3(0), stage=3), MODEL, 'files of several runs'),
    'other shape': (1, edit(MODEL, lambda s: shapes(s, 'b.weight', (12,))), optim(0), 'in equal parts'),
    'other shape at 3': (3, edit(model3(0), lambda s: shapes(s, 'b.weight', (99,))), model3(1), 'shapes of parameters'),
    'same size, other shape': (1, edit(MODEL, lambda s: shapes(s, 'a.weight', (3, 5))), MODEL, 'another one in'),
    'short frozen slice': (
        3, edit(model3(1), lambda s: s['frozen_param_fragments'].update(frozen=HALF[0])), model3(1), 'elements'),
    'lost frozen slice': (
        3, edit(model3(1), lambda s: s['frozen_param_fragments'].clear()), model3(1), 'lacks the frozen'),
    'no fp32 weights': (
        1, edit(optim(0), lambda s: s['optimizer_state_dict'].pop(FLAT)), optim(0), 'not an optimizer file'),
    'unknown stage': (1, edit(optim(0), lambda s: s['optimizer_state_dict'].update(zero_stage=7)), optim(0), 'unknown'),
    'another model file': (1, edit(MODEL, lambda s: s.pop('buffer_names')), MODEL, 'not a model file'),
    'tensor parallel': (1, edit(MODEL, lambda s: s.update(mp_world_size=2)), MODEL, 'tensor or expert parallelism'),
    'experts of AutoEP': (1, edit(MODEL, lambda s: s.update(ds_autoep_layers=[{'a': 1}])), MODEL, 'expert parallelism'),
}  # fmt: skip


@pytest.mark.parametrize('case', CASES)
def test_is_refused(tmp_path, case):
    stage, spoil, file, words = CASES[case]
    made = MadeCheckpoint(stage=stage, world_size=3, frozen={'frozen': HALF}, buffers=BUFFERS)
    folder = made.write(tmp_path / 'global_step5')
    read_all(open_checkpoint(folder))  # fine so far
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert words in message and file in message and '\n' not in message
    assert str(folder) in message
    assert ';' in message or 'not supported' in message  # what to do comes last
