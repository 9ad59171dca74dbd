"""Real checkpoints of real engines, read back: what the hook saved at that moment, and what zero_to_fp32 gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_equivalence import build_model
from tests.helpers.compare import folder_tensors
from tests.helpers.engines import save_folder, zero_engine
from tests.helpers.read_checkpoint import assert_same_tensors, open_checkpoint, read_all
from tests.helpers.scenarios import Outcome, check, run_scenarios
from xhf_hooks.errors import CheckpointError

STEPS = 2
TAG = 'saved'
FP32_GRADIENTS = dict(data_types=dict(grad_accum_dtype='fp32'))
OLD_FILES = dict(checkpoint=dict(checkpoint_serialization=False))
#: Name, which begins with the model, to how it is trained.
CASES: dict[str, dict[str, Any]] = {
    'frozen-zero0': dict(stage=0),
    'frozen-zero1': dict(stage=1),
    'tied-zero2': dict(stage=2),
    'frozen-zero3': dict(stage=3),
    'frozen-zero3_small_sub_groups': dict(stage=3, sub_group_size=1000),
    'tied-zero3': dict(stage=3),
    'untied-zero3_default_persistence': dict(stage=3, stage3_param_persistence_threshold=100_000),
    'tied-round_robin_zero1': dict(stage=1, round_robin_gradients=True),
    'frozen-fp32_zero1': dict(stage=1, bf16=False),
    'tied-fp32_zero3': dict(stage=3, bf16=False),
    'frozen-fp32_gradients_zero1': dict(stage=1, sections=FP32_GRADIENTS),
    'tied-two_groups_zero2': dict(stage=2, two_groups=True),
    'frozen-two_groups_zero3': dict(stage=3, two_groups=True),
    'tied-old_files_zero1': dict(stage=1, sections=OLD_FILES),
    'frozen-old_files_zero3': dict(stage=3, sections=OLD_FILES),
}
#: By number of ranks; to three, nothing is shared out evenly.
CASES_OF = {2: [*CASES], 3: ['frozen-zero1', 'frozen-zero3']}
EVERYWHERE = [
    # DeepSpeed 0.16 always writes zip files
    pytest.param(n, case, id=f'{n}ranks-{case}', marks=[pytest.mark.modern_only] * (n != 2 or 'old_files' in case))
    for n, cases in CASES_OF.items()
    for case in cases
]
WITH_ZERO = [param for param in EVERYWHERE if 'zero0' not in param.id]


def train_and_save(case: str, folder: Path) -> None:
    """Runs on: all ranks."""
    import torch

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
    save_folder(engine.module, folder / 'float32', dtype='float32')
    engine.destroy()


#: Runs that begin with the checkpoint of another, and whether the steps of their optimizer begin anew.
RESUMES = {'resumed': False, 'another optimizer': True, 'load_from': True, 'load_from and resume': True}


def go_on(first: Path, folder: Path) -> None:
    """Such runs: plain DeepSpeed's and MMEngine's. Runs on: all ranks."""
    import torch

    from tests.helpers.toy_run import run_config, train

    for name, options in {'resumed': {}, 'another optimizer': dict(load_optimizer_states=False)}.items():
        engine = zero_engine(build_model('tied'), 3)
        engine.load_checkpoint(str(first), tag=TAG, **options)
        for step in range(STEPS + 1):
            tokens = torch.arange(8).reshape(1, 8) + step
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.save_checkpoint(str(folder / name), tag=TAG)
        engine.destroy()
    for name, begin in {
        'mmengine': dict(max_iters=6),
        'load_from': dict(max_iters=4, load_from=str(folder / 'mmengine' / 'iter_6.pth')),
        'load_from and resume': dict(max_iters=8, load_from=str(folder / 'load_from' / 'iter_4.pth'), resume=True),
    }.items():
        train(run_config(folder / name, hook=None, stage=3, accumulate=2, **begin))
        (folder / name / 'latest').write_text(f'iter_{begin["max_iters"]}.pth')  # load_from needs it at ZeRO-3


@pytest.fixture(scope='module')
def launch(tmp_path_factory):
    """Gives the folder and the outcomes of all cases at a number of ranks, from one launch each."""

    @cache
    def run(world_size: int) -> tuple[Path, dict[str, list[Outcome]]]:
        root = tmp_path_factory.mktemp(f'checkpoints{world_size}')
        scenarios = {case: partial(train_and_save, case, root / case) for case in CASES_OF[world_size]}
        if world_size == 2:
            scenarios['go_on'] = partial(go_on, root / 'tied-zero3' / 'checkpoint', root / 'go_on')
        return root, run_scenarios(scenarios, world_size)

    return run


@pytest.fixture
def saved(launch, world_size, case):
    root, results = launch(world_size)
    check(results, case)
    return root / case


@pytest.mark.parametrize(('world_size', 'case'), EVERYWHERE)
def test_tells_what_it_is(saved, world_size, case):
    kind, options = case.partition('-')[0], CASES[case]
    source = open_checkpoint(saved / 'checkpoint')
    facts = {'engine': 'deepspeed', 'zero_stage': options['stage'], 'world_size': world_size, 'layout': 'deepspeed'}
    assert facts.items() <= source.facts.items()
    assert source.iteration == STEPS and source.warnings == []

    specs = source.specs()
    model = build_model(kind)
    assert [spec.name for spec in specs] == [name for name, _ in model.named_parameters()]
    assert [spec.aliases for spec in specs if spec.aliases] == ([('lm_head.weight',)] if kind == 'tied' else [])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # Without ZeRO they have no names, unless DeepSpeed takes the optimizer of stage 1, as 0.16 does
    has_masters = bool(source.found.optim_files) and options.get('bf16', True)
    assert [spec.name for spec in specs if spec.has_master] == (trained if has_masters else [])


@pytest.mark.parametrize(('world_size', 'case'), EVERYWHERE)
def test_reads_what_the_hook_saved(saved, world_size, case):
    source = open_checkpoint(saved / 'checkpoint')
    first_names = [spec.name for spec in source.specs()]
    as_trained = {name: tensor for name, tensor in read_all(source).items() if name in first_names}
    masters = {name: tensor for name, tensor in read_all(source, use_fp32_master=True).items() if name in first_names}
    assert_same_tensors(as_trained, folder_tensors(saved / 'as_trained'))
    assert_same_tensors({name: t.to(as_trained[name].dtype) for name, t in masters.items()}, as_trained)
    if 'round_robin' not in case:  # DeepSpeed itself looks for the live masters in the wrong order then
        assert_same_tensors({n: t.float() for n, t in masters.items()}, folder_tensors(saved / 'float32'))


@pytest.mark.parametrize(('world_size', 'case'), WITH_ZERO)
def test_masters_are_what_zero_to_fp32_gives(saved, world_size, case):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    kind, options = case.partition('-')[0], CASES[case]
    if 'sections' in options:  # read by us, and not by zero_to_fp32
        with pytest.raises((ValueError, RuntimeError), match=r'is not a zero checkpoint|mmap can only be used'):
            get_fp32_state_dict_from_zero_checkpoint(str(saved / 'checkpoint'))
        return
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(saved / 'checkpoint'))
    ours = read_all(open_checkpoint(saved / 'checkpoint'), use_fp32_master=True)
    assert bool(ours.keys() - theirs.keys()) == (kind == 'frozen' and options['stage'] == 1)  # which it drops
    assert_same_tensors(
        {name: ours[name].float() for name in theirs}, {name: tensor.float() for name, tensor in theirs.items()}
    )


def files(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f'*{kind}_states.pt'))


def swap(files: list[Path]) -> None:
    """The first rank's and the last's."""
    files[0].rename(files[0].with_suffix('.x'))
    files[-1].rename(files[0])
    files[0].with_suffix('.x').rename(files[-1])


def put(files: list[Path], folder: Path) -> None:
    for file in files:
        shutil.copy(file, folder)


#: What is done to a folder, with the same run's files of an earlier step at hand, and what is told then; '' refuses it.
MIXES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    'files of two ranks swapped': (lambda folder, earlier: swap(files(folder, 'optim')), ''),
    'one file of an earlier step': (lambda folder, earlier: put(files(earlier, 'optim')[1:], folder), ''),
    'optimizer of an earlier step': (
        lambda folder, earlier: put(files(earlier, 'optim'), folder),
        'the iteration of the fp32 weights',
    ),
    'model of an earlier step': (
        lambda folder, earlier: put(files(earlier, 'model'), folder),
        'the iteration of the fp32 weights',
    ),
}


@pytest.mark.modern_only
@pytest.mark.parametrize('mix', MIXES)
@pytest.mark.parametrize(('world_size', 'case'), [(2, 'frozen-zero1'), (2, 'frozen-zero3')])
def test_files_of_other_ranks_and_steps_are_refused_or_told(saved, world_size, case, mix, tmp_path):
    folder, earlier = (shutil.copytree(saved / name / TAG, tmp_path / name) for name in ('checkpoint', 'earlier'))
    do, told = MIXES[mix]
    do(folder, earlier)
    if told:
        unproven = ' '.join(open_checkpoint(folder).unproven)
        assert told in unproven and 'that all files are of one run' in unproven
        return
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value) and '\n' not in str(caught.value)


@pytest.mark.parametrize('name', RESUMES)
def test_runs_that_began_with_a_checkpoint(launch, name):
    """Steps of the engine go on where those of the optimizer may begin anew."""
    root, results = launch(2)
    check(results, 'tied-zero3'), check(results, 'go_on')
    source = open_checkpoint(root / 'go_on' / name)
    assert read_all(source)
    # As if the optimizer's files were of an earlier step
    assert ('has made' in source.unproven[-1]) == RESUMES[name]
