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
from xhf_hooks.sources.checkpoint import CheckpointSource, find_checkpoint

STEPS = 2
TAG = 'saved'
FP32_GRADIENTS = dict(data_types=dict(grad_accum_dtype='fp32'))
OLD_FILES = dict(checkpoint=dict(checkpoint_serialization=False))
#: Model, and how it is trained.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f'{model}-{name}': (model, options)
    for model in ('tied', 'frozen')
    for name, options in {
        'zero0': dict(stage=0),
        'zero1': dict(stage=1),
        'zero2': dict(stage=2),
        'zero3': dict(stage=3),
        'zero3_small_sub_groups': dict(stage=3, sub_group_size=1000),
    }.items()
}
#: Those that do not depend on the number of ranks.
MORE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    'untied-zero1': ('untied', dict(stage=1)),
    'untied-zero3_default_persistence': ('untied', dict(stage=3, stage3_param_persistence_threshold=100_000)),
    'tied-round_robin_zero1': ('tied', dict(stage=1, round_robin_gradients=True)),
    'tied-fp32_zero0': ('tied', dict(stage=0, bf16=False)),
    'frozen-fp32_zero1': ('frozen', dict(stage=1, bf16=False)),
    'tied-fp32_zero3': ('tied', dict(stage=3, bf16=False)),
    'frozen-fp32_gradients_zero1': ('frozen', dict(stage=1, sections=FP32_GRADIENTS)),
    'tied-two_groups_zero2': ('tied', dict(stage=2, two_groups=True)),
    'frozen-two_groups_zero3': ('frozen', dict(stage=3, two_groups=True)),
    'tied-old_files_zero1': ('tied', dict(stage=1, sections=OLD_FILES)),
    'frozen-old_files_zero3': ('frozen', dict(stage=3, sections=OLD_FILES)),
}
CASES_OF = {2: CASES | MORE_CASES, 1: CASES, 3: CASES}
EVERYWHERE = [
    # DeepSpeed 0.16 always writes zip files
    pytest.param(n, case, id=f'{n}ranks-{case}', marks=[pytest.mark.modern_only] * (n != 2 or 'old_files' in case))
    for n, cases in CASES_OF.items()
    for case in cases
]
WITH_ZERO = [param for param in EVERYWHERE if 'zero0' not in param.id]


def train_and_save(kind: str, options: dict[str, Any], folder: Path) -> None:
    """Runs on: all ranks."""
    import torch

    model = build_model(kind)
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


#: How plain DeepSpeed goes on with a checkpoint.
RESUMES: dict[str, dict[str, Any]] = {
    'resumed': {},
    'weights only': dict(load_module_only=True),
    'another optimizer': dict(load_optimizer_states=False),
}


def go_on(first: Path, folder: Path) -> None:
    """Runs that begin with the checkpoint of another: plain DeepSpeed's and MMEngine's. Runs on: all ranks."""
    import torch

    from tests.helpers.toy_run import run_config, train

    for name, options in RESUMES.items():
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
        'load_from': dict(max_iters=4, load_from=folder / 'mmengine' / 'iter_6.pth'),
        'resume': dict(max_iters=10, load_from=folder / 'mmengine' / 'iter_6.pth', resume=True),
        'load_from and resume': dict(max_iters=8, load_from=folder / 'load_from' / 'iter_4.pth', resume=True),
    }.items():
        begin = {key: str(value) if key == 'load_from' else value for key, value in begin.items()}
        train(run_config(folder / name, hook=None, stage=3, accumulate=2, **begin))
        (folder / name / 'latest').write_text(f'iter_{begin["max_iters"]}.pth')  # load_from needs it at ZeRO-3


@pytest.fixture(scope='module')
def launch(tmp_path_factory):
    """Gives the folder and the outcomes of all cases at a number of ranks, from one launch each."""

    @cache
    def run(world_size: int) -> tuple[Path, dict[str, list[Outcome]]]:
        root = tmp_path_factory.mktemp(f'checkpoints{world_size}')
        cases = CASES_OF[world_size]
        scenarios = {name: partial(train_and_save, *case, root / name) for name, case in cases.items()}
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
    kind, options = CASES_OF[world_size][case]
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

    kind, options = CASES_OF[world_size][case]
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


def optims(folder: Path) -> list[Path]:
    return sorted(folder.glob('*optim_states.pt'))


def models(folder: Path) -> list[Path]:
    return sorted(folder.glob('*model_states.pt'))


def swap(files: list[Path]) -> None:
    """The first rank's and the last's."""
    files[0].rename(files[0].with_suffix('.x'))
    files[-1].rename(files[0])
    files[0].with_suffix('.x').rename(files[-1])


def put(files: list[Path], folder: Path) -> None:
    for file in files:
        shutil.copy(file, folder)


#: What is done to a folder, with the same run's files of an earlier step at hand.
MIXES: dict[str, Callable[[Path, Path], Any]] = {
    'optimizer files swapped': lambda folder, earlier: swap(optims(folder)),
    'model files swapped': lambda folder, earlier: swap(models(folder)),
    'both swapped': lambda folder, earlier: (swap(optims(folder)), swap(models(folder))),
    'optimizer files of an earlier step': lambda folder, earlier: put(optims(earlier), folder),
    'model files of an earlier step': lambda folder, earlier: put(models(earlier), folder),
    'one optimizer file of an earlier step': lambda folder, earlier: put(optims(earlier)[1:2], folder),
    'one model file of an earlier step': lambda folder, earlier: put(models(earlier)[1:2], folder),
}
MIXED = [
    pytest.param(n, case, mix, named, id=f'{n}ranks-{case}-{mix}-{"named" if named else "nameless"}')
    for n in (2, 3)
    for case in CASES
    for mix in MIXES
    for named in (True, False)
    if not case.endswith('zero0') and ('zero3' in case or mix.startswith('optim') or 'model files of' in mix)
]


def read_or_refuse(folder: Path, use_fp32_master: bool) -> dict[str, Any] | None:
    try:
        return read_all(open_checkpoint(folder), use_fp32_master=use_fp32_master)
    except CheckpointError as error:
        assert str(folder) in str(error) and '\n' not in str(error)
        return None


def forget_names(folder: Path) -> None:
    """Save the files as through a stream, which has no name."""
    import torch

    for file in folder.glob('*_states.pt'):
        state = torch.load(file, weights_only=False)
        with file.open('wb') as stream:
            torch.save(state, stream)


@pytest.mark.modern_only
@pytest.mark.parametrize(('world_size', 'case', 'mix', 'named'), MIXED)
def test_files_of_other_ranks_and_steps_are_refused_or_told(saved, world_size, case, mix, named, tmp_path):
    folder, earlier = (shutil.copytree(saved / name / TAG, tmp_path / name) for name in ('checkpoint', 'earlier'))
    if not named:
        forget_names(folder)
        forget_names(earlier)
    MIXES[mix](folder, earlier)
    if (named and 'swapped' in mix) or mix.startswith('one '):
        assert read_or_refuse(folder, use_fp32_master=True) is None
        return
    if 'zero3' not in case and 'swapped' in mix and read_or_refuse(folder, use_fp32_master=True) is None:
        return  # the last rank's parts are shorter
    told = ' '.join(open_checkpoint(folder).unproven)
    assert 'that all files are of one run' in told
    assert ('only the file names say' in told) == ('swapped' in mix or not named)
    assert ('the iteration of the fp32 weights' in told) == ('earlier' in mix)


@pytest.mark.parametrize('name', [*RESUMES, 'mmengine', 'load_from', 'resume', 'load_from and resume'])
def test_runs_that_began_with_a_checkpoint(launch, name):
    """Steps of the engine go on where those of the optimizer may begin anew."""
    root, results = launch(2)
    check(results, 'tied-zero3'), check(results, 'go_on')
    found = find_checkpoint(root / 'go_on' / name)
    source = CheckpointSource(found)
    assert read_all(source)
    # As if the optimizer's files were of an earlier step
    assert ('has made' in source.unproven[-1]) == (name in ('another optimizer', 'load_from', 'load_from and resume'))
