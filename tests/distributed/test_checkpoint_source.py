"""Real checkpoints of real engines, read back: what the hook saved at that moment, and what zero_to_fp32 gives."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.helpers.checks.compare import assert_same_tensors, folder_tensors
from tests.helpers.checks.read_checkpoint import open_checkpoint, read_all
from tests.helpers.models.zoo.llamas import build_model
from tests.helpers.ranks.scenarios import run_scenarios
from tests.helpers.runs.engines import save_folder, zero_engine
from tests.helpers.runs.toy_run import run_config, train
from xhf_hooks.errors import CheckpointError

N_RANKS = 3  # nothing is shared out evenly
STEPS = 2
TAG = 'saved'
FP32_GRADIENTS = dict(data_types=dict(grad_accum_dtype='fp32'))
#: Name, which begins with the model, to how it is trained.
CASES: dict[str, dict[str, Any]] = {
    'frozen-zero0': dict(stage=0),
    'frozen-zero1': dict(stage=1),
    'frozen-zero3': dict(stage=3),
    'frozen-zero3_small_sub_groups': dict(stage=3, sub_group_size=1000),
    'untied-zero3_default_persistence': dict(stage=3, stage3_param_persistence_threshold=100_000),
    'tied-round_robin_zero1': dict(stage=1, round_robin_gradients=True),
    'frozen-fp32_zero1': dict(stage=1, bf16=False),
    'tied-fp32_zero3': dict(stage=3, bf16=False),
    'frozen-fp32_gradients_zero1': dict(stage=1, sections=FP32_GRADIENTS),
    'tied-two_groups_zero2': dict(stage=2, two_groups=True),
    'tied-two_groups_zero3': dict(stage=3, two_groups=True),
}
#: Which zero_to_fp32 reads: with ZeRO, and without options that only we read.
WITH_ZERO = [case for case, options in CASES.items() if options['stage'] and 'sections' not in options]


def train_and_save(case: str, folder: Path) -> None:
    options = CASES[case]
    model = build_model(case.partition('-')[0])
    if options.get('bf16') is False:
        model = model.float()
    engine = zero_engine(model, **options)
    for step in range(STEPS):
        tokens = torch.arange(8).reshape(1, 8) + 3 * step
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.save_checkpoint(str(folder / ('earlier' if step + 1 < STEPS else 'checkpoint')), tag=TAG)
    save_folder(engine.module, folder / 'as_trained')
    if 'round_robin_gradients' not in options:  # refused: DeepSpeed looks for the live masters in the wrong order then
        save_folder(engine.module, folder / 'float32', dtype='float32')
    engine.destroy()


#: Runs of MMEngine, and whether the steps of their optimizer begin anew.
RUNS = {'first': False, 'load_from': True, 'load_from and resume': True}


def go_on(folder: Path) -> None:
    """A run, one that begins with its weights, and one that resumes that. Runs on: all ranks."""
    begins: list[dict[str, Any]] = [
        dict(max_iters=4),
        dict(max_iters=2, load_from=str(folder / 'first' / 'iter_4.pth')),
        dict(max_iters=4, load_from=str(folder / 'load_from' / 'iter_2.pth'), resume=True),
    ]
    for name, begin in zip(RUNS, begins, strict=True):
        train(run_config(folder / name, hook=None, stage=3, accumulate=2, **begin))
        (folder / name / 'latest').write_text(f'iter_{begin["max_iters"]}.pth')  # load_from needs it at ZeRO-3


@pytest.fixture(scope='module')
def launch(tmp_path_factory):
    root = tmp_path_factory.mktemp('checkpoints')
    scenarios = {case: partial(train_and_save, case, root / case) for case in CASES}
    return run_scenarios({**scenarios, 'go_on': partial(go_on, root / 'go_on')}, N_RANKS, root=root)


@pytest.fixture
def saved(launch, case):
    return launch.folder(case)


@pytest.mark.parametrize('case', CASES)
def test_reads_what_the_hook_saved_and_tells_what_it_is(saved, case):
    kind, options = case.partition('-')[0], CASES[case]
    source = open_checkpoint(saved / 'checkpoint')
    manifest_fields = {
        'engine': 'deepspeed',
        'zero_stage': options['stage'],
        'world_size': N_RANKS,
        'layout': 'deepspeed',
    }
    assert manifest_fields.items() <= source.manifest_fields.items() and source.iteration == STEPS
    assert source.warnings == [] and not any('which rank wrote' in told for told in source.unproven)

    parameters, specs = dict(build_model(kind).named_parameters()), source.specs()
    assert [spec.name for spec in specs] == list(parameters)
    assert [spec.aliases for spec in specs if spec.aliases] == ([('lm_head.weight',)] if kind == 'tied' else [])
    # Without ZeRO they have no names, unless DeepSpeed takes the optimizer of stage 1, as 0.16 does
    has_masters = bool(source.found.optim_files) and options.get('bf16', True)
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad and has_masters]
    assert [spec.name for spec in specs if spec.has_master] == trained

    as_trained = {name: tensor for name, tensor in read_all(source).items() if name in parameters}
    masters = {name: tensor for name, tensor in read_all(source, from_master=True).items() if name in parameters}
    assert_same_tensors(as_trained, folder_tensors(saved / 'as_trained'))
    assert_same_tensors({name: t.to(as_trained[name].dtype) for name, t in masters.items()}, as_trained)
    if 'round_robin' not in case:
        assert_same_tensors({n: t.float() for n, t in masters.items()}, folder_tensors(saved / 'float32'))


@pytest.mark.parametrize('case', WITH_ZERO)
def test_masters_are_what_zero_to_fp32_gives(saved, case):
    kind, options = case.partition('-')[0], CASES[case]
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(saved / 'checkpoint'))
    ours = read_all(open_checkpoint(saved / 'checkpoint'), from_master=True)
    assert bool(ours.keys() - theirs.keys()) == (kind == 'frozen' and options['stage'] == 1)  # which it drops
    assert_same_tensors(
        {name: ours[name].float() for name in theirs}, {name: tensor.float() for name, tensor in theirs.items()}
    )


def swap(folder: Path, earlier: Path) -> None:
    first, *_, last = sorted(folder.glob('*optim_states.pt'))
    first.rename(folder / 'x')
    last.rename(first)
    (folder / 'x').rename(last)


def put(pattern: str, begin: int, folder: Path, earlier: Path) -> None:
    for file in sorted(earlier.glob(pattern))[begin:]:
        shutil.copy(file, folder)


#: The weights show it where the model files have them, too.
OTHER_STEPS = r'has made \d steps, \S+ \d, and \S+ differs: not of one save'
#: What is done to a folder, with the same run's files of an earlier step at hand; and why it is refused.
MIXES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    'files of two ranks swapped': (swap, r'was saved as \S+ and renamed'),
    'one file of an earlier step': (partial(put, '*optim_states.pt', 2), 'not of one save'),
    'optimizer of an earlier step': (partial(put, '*optim_states.pt', 0), OTHER_STEPS),
    'model of an earlier step': (partial(put, '*model_states.pt', 0), OTHER_STEPS),
}


@pytest.mark.parametrize('mix', MIXES)
@pytest.mark.parametrize('case', ['frozen-zero1', 'frozen-zero3'])
def test_files_of_other_ranks_and_steps_are_refused_or_told(saved, case, mix, tmp_path):
    folder, earlier = (shutil.copytree(saved / name / TAG, tmp_path / name) for name in ('checkpoint', 'earlier'))
    do, why = MIXES[mix]
    do(folder, earlier)
    if why == OTHER_STEPS and case == 'frozen-zero3':  # its model files have no weights
        (warning,) = open_checkpoint(folder).warnings
        assert warning.startswith('could not verify that model and optimizer files are of one step')
    else:
        with pytest.raises(CheckpointError, match=why) as caught:
            open_checkpoint(folder)
        assert str(folder) in str(caught.value) and '\n' not in str(caught.value)


@pytest.mark.parametrize('name', RUNS)
def test_runs_that_began_with_a_checkpoint(launch, name):
    """Steps of the engine go on where those of the optimizer may begin anew."""
    source = open_checkpoint(launch.folder('go_on') / name)
    assert read_all(source)
    # As if the optimizer's files were of an earlier step
    assert [('has made' in told) for told in source.warnings] == [True] * RUNS[name]
