"""Checkpoints in other layouts than a run's own of DeepSpeed: real ones, converted, against what the hook saved."""

from __future__ import annotations

import argparse
import json
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_checkpoint_source import STEPS, TAG, train_and_save
from tests.helpers.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.converted import convert
from tests.helpers.fsdp_runs import accelerates, config_alone, plain_dcp, strategy_run
from tests.helpers.model_folder import edit_json
from tests.helpers.read_checkpoint import assert_same_tensors, open_checkpoint, read_all
from tests.helpers.scenarios import check, run_scenarios
from xhf_hooks.cli.verify import main as verify
from xhf_hooks.errors import CheckpointError

UNIVERSAL = ('frozen-zero1', 'tied-two_groups_zero2', 'tied-zero3', 'frozen-two_groups_zero3')
#: DeepSpeed 0.16's tool fails at several groups at stage 3.
BY_TOOL = [
    pytest.param(case, marks=[pytest.mark.modern_only] if 'two_groups_zero3' in case else []) for case in UNIVERSAL
]
MADE = f'{TAG}_universal'
SHARDED, FULL, LOCAL = (f'{kind}_STATE_DICT' for kind in ('SHARDED', 'FULL', 'LOCAL'))
DCP: dict[str, Any] = {
    'accelerate_fsdp1_tied': partial(accelerates, 'tied', 1, SHARDED),
    'accelerate_fsdp2_untied': partial(accelerates, 'untied', 2, SHARDED),
    'plain_bf16': partial(plain_dcp, 'bf16'),
}
FSDP: dict[str, Any] = {
    **DCP,
    'accelerate_fsdp2_full': partial(accelerates, 'tied', 2, FULL),
    'accelerate_fsdp1_local': partial(accelerates, 'untied', 1, LOCAL),
    'accelerate_fsdp2_lora': partial(accelerates, 'lora', 2, SHARDED),
    'strategy_full': partial(strategy_run, 'full'),
    'strategy_local': partial(strategy_run, 'local'),
}
OTHERS = ('accelerate_fsdp2_full', 'strategy_full')


def to_universal(checkpoint: Path) -> None:
    """DeepSpeed's own tool, as ``python -m deepspeed.checkpoint.ds_to_universal`` runs it."""
    from deepspeed.checkpoint.ds_to_universal import main

    options = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False)
    options |= dict(strict=True, inject_missing_state=True)
    made = str(checkpoint.with_name(MADE))
    main(argparse.Namespace(input_folder=str(checkpoint), output_folder=made, **options))


@pytest.fixture(scope='module')
def universal(tmp_path_factory):
    """Gives the folder of a case, its checkpoints made universal when it is first asked for."""
    root = tmp_path_factory.mktemp('universal')
    results = run_scenarios({case: partial(train_and_save, case, root / case) for case in UNIVERSAL}, 2)

    @cache
    def folder_of(case: str) -> Path:
        check(results, case)
        to_universal(root / case / 'checkpoint' / TAG)
        config_alone(root / case / 'as_trained', root / case / 'base')
        return root / case

    return folder_of


@pytest.mark.parametrize('case', BY_TOOL)
def test_universal_is_what_it_was_made_of(universal, case):
    folder = universal(case) / 'checkpoint'
    original, made = (open_checkpoint(folder / f'{TAG}{end}') for end in ('', '_universal'))
    assert made.specs() == original.specs() and made.iteration == STEPS and made.warnings == []
    assert made.facts == {**original.facts, 'layout': 'universal', 'checkpoint': str(made.found.path)}
    for masters in (False, True):
        assert_same_tensors(read_all(made, use_fp32_master=masters), read_all(original, use_fp32_master=masters))


@pytest.mark.parametrize('case', BY_TOOL)
def test_universal_gives_the_hooks_bytes(universal, case, tmp_path):
    folder = universal(case)
    shutil.copytree(folder / 'checkpoint', tmp_path / 'checkpoint')
    (tmp_path / 'checkpoint' / 'latest').unlink()  # latest_universal is left
    options = ('--base', folder / 'base', '--verify')
    found = convert(tmp_path / 'checkpoint', tmp_path / 'out', *options)
    assert_same_folder_tensors(found, folder / 'as_trained')
    exact = convert(tmp_path / 'checkpoint', tmp_path / 'float32', *options, '--dtype', 'float32')
    assert_same_folder_tensors(exact, folder / 'float32')
    base = ['--base', str(folder / 'base')]
    assert verify([str(tmp_path / 'checkpoint'), str(folder / 'as_trained'), *base]) == 0
    assert verify([str(folder / 'float32'), str(tmp_path / 'checkpoint'), *base]) == 0


DAMAGES: dict[str, tuple[Any, str]] = {
    'no values of a parameter': (lambda f: (f / 'zero/lm_head.weight/fp32.pt').unlink(), r'fp32\.pt: cannot be read'),
    'no parameter': (
        lambda f: shutil.rmtree(f / 'zero/lm_head.weight'),
        r'zero/lm_head\.weight: expected a parameter',
    ),
    'one of another run': (
        lambda f: shutil.copytree(f / 'zero/lm_head.weight', f / 'zero/other.weight'),
        r'zero/other\.weight: expected a parameter',
    ),
    'another parameter': (
        lambda f: shutil.copy(f / 'zero/model.norm.weight/fp32.pt', f / 'zero/lm_head.weight/fp32.pt'),
        r'zero/lm_head\.weight: expected a parameter',
    ),
    'no model files': (lambda f: [p.unlink() for p in f.glob('*model_states.pt')], 'ds_to_universal.py did not finish'),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_universal(universal, damage, tmp_path):
    folder = tmp_path / 'made'
    shutil.copytree(universal('frozen-zero1') / 'checkpoint' / MADE, folder)
    (told,) = open_checkpoint(folder).unproven
    assert told.startswith('not verifiable: that all files are of one run')
    edit, words = DAMAGES[damage]
    edit(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value) and '\n' not in str(caught.value)


@pytest.fixture(scope='module')
def fsdp(tmp_path_factory):
    """On three ranks, which the rows of no weight are shared out to evenly."""
    root = tmp_path_factory.mktemp('fsdp_checkpoints')
    scenarios = {name: partial(run, root / name) for name, run in FSDP.items()}
    return root, run_scenarios(scenarios, 3)


def saved(fsdp: Any, case: str) -> Path:
    check(fsdp[1], case)
    return fsdp[0] / case


@pytest.mark.modern_only
@pytest.mark.parametrize('case', DCP)
def test_dcp_is_what_torch_reads(fsdp, case, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    source = open_checkpoint(saved(fsdp, case) / 'state')
    dcp_to_torch_save(source.found.path, tmp_path / 'theirs.pth')
    theirs = torch.load(tmp_path / 'theirs.pth')
    theirs = theirs.get('app', theirs)
    assert_same_tensors(read_all(source), theirs.get('model', theirs))
    assert source.facts['engine'] == 'torch' and source.facts['layout'] == 'dcp'
    assert len(source.unproven) == 1 and 'not verifiable' in source.unproven[0]


@pytest.mark.modern_only
@pytest.mark.parametrize('case', DCP)
def test_dcp_gives_the_hooks_bytes(fsdp, case, tmp_path):
    folder = saved(fsdp, case)
    base = config_alone(folder / 'hook', tmp_path / 'base')
    assert_same_folder_tensors(convert(folder / 'state', tmp_path / 'out', '--base', base, '--verify'), folder / 'hook')
    assert verify([str(folder / 'state'), str(folder / 'hook'), '--base', str(base)]) == 0
    rounded = folder_tensors(convert(folder / 'state', tmp_path / 'half', '--base', base, '--dtype', 'bfloat16'))
    assert all(rounded[name].equal(t.bfloat16()) for name, t in folder_tensors(folder / 'hook').items())


@pytest.mark.modern_only
def test_trainers_folder_needs_no_base(fsdp, tmp_path):
    """``checkpoint-500`` of an FSDP run: Accelerate's folders, beside Trainer's config.json."""
    folder = saved(fsdp, 'accelerate_fsdp2_untied')
    checkpoint = tmp_path / 'checkpoint-500'
    shutil.copytree(folder / 'state', checkpoint)
    shutil.copy(folder / 'hook' / 'config.json', checkpoint)
    assert {path.name for path in checkpoint.iterdir()} == {'pytorch_model_fsdp_0', 'optimizer_0', 'config.json'}
    found = convert(checkpoint, tmp_path / 'out')
    assert_same_folder_tensors(found, folder / 'hook')
    assert json.loads((found / 'xhf_manifest.json').read_text())['iteration'] == 500
    with pytest.raises(CheckpointError, match=r"expected one model's state dict.*give the model's folder"):
        open_checkpoint(checkpoint / 'optimizer_0')


@pytest.mark.modern_only
def test_lora_under_fsdp(fsdp, tmp_path):
    folder = saved(fsdp, 'accelerate_fsdp2_lora')
    base = config_alone(folder / 'hook', tmp_path / 'base')
    model = config_alone(saved(fsdp, 'accelerate_fsdp2_untied') / 'hook', tmp_path / 'model')
    edit_json(base / 'adapter_config.json', base_model_name_or_path=str(model))
    found = convert(folder / 'state', tmp_path / 'out', '--base', base)
    assert_same_folder_tensors(found, folder / 'hook')


@pytest.mark.modern_only
@pytest.mark.parametrize('case', OTHERS)
def test_other_state_dicts_of_fsdp(fsdp, case, tmp_path):
    folder = saved(fsdp, case)
    checkpoint = folder / ('state' if 'accelerate' in case else 'run')
    base = config_alone(folder / 'hook', tmp_path / 'base')
    found = convert(checkpoint, tmp_path / 'out', '--base', base, '--verify')
    assert_same_folder_tensors(found, folder / 'hook')
    assert verify([str(checkpoint), str(folder / 'hook'), '--base', str(base)]) == 0


@pytest.mark.modern_only
@pytest.mark.parametrize('case', ['accelerate_fsdp1_local', 'strategy_local'])
def test_who_reads_the_others(fsdp, case):
    folder = saved(fsdp, case)
    with pytest.raises(CheckpointError, match=r"one part of an FSDP.*load_state.*state_dict_cfg='full'") as caught:
        open_checkpoint(folder / ('state' if 'accelerate' in case else 'run'))
    assert str(folder) in str(caught.value) and '\n' not in str(caught.value)
