"""Models under torch's FSDP1 and FSDP2: save_hf gives what the whole model gives, and so do converted checkpoints."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.checks.config_fields import assert_same_config
from tests.helpers.checks.converted import assert_same_files, convert
from tests.helpers.checks.read_checkpoint import open_checkpoint
from tests.helpers.models.model_folder import edit_json
from tests.helpers.models.zoo.llamas import larger_llama, odd_llama
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs import frontends as doors
from tests.helpers.runs.fsdp_runs import (
    accelerates,
    config_alone,
    plain_dcp,
    save_whole,
    shard,
    strategy_run,
    whole_state,
)
from xhf_hooks.cli.verify import main as verify
from xhf_hooks.errors import CheckpointError

WRITERS = ('stream', 'parallel', 'positional', 'gather')
MEMORY = [('fsdp1', 'gather'), ('fsdp2', 'stream')]
N_RANKS = 3  # the rows of no weight are shared out evenly
#: Model and how it is sharded.
CASES = (
    *('tied-fsdp2', 'tied-fsdp2_root_only', 'tied-fsdp1', 'tied-fsdp1_grad_op'),
    *('untied-fsdp2_columns', 'lora-fsdp1', 'lora-fsdp2'),
)
#: Runs that write checkpoints, with the hook's export beside them. The first three are folders of DCP.
RUNS: dict[str, Any] = {
    'accelerate_fsdp1_tied': partial(accelerates, 'tied', 1, 'SHARDED_STATE_DICT'),
    'accelerate_fsdp2_untied': partial(accelerates, 'untied', 2, 'SHARDED_STATE_DICT'),
    'plain_bf16': partial(plain_dcp, 'bf16'),
    'accelerate_fsdp2_full': partial(accelerates, 'tied', 2, 'FULL_STATE_DICT'),
    'strategy_full': partial(strategy_run, 'full'),
    'strategy_local': partial(strategy_run, 'local'),
    'accelerate_fsdp2_lora': partial(accelerates, 'lora', 2, 'SHARDED_STATE_DICT'),
}


def save_case(model_kind: str, kind: str, root: Path) -> None:
    """Runs on: all ranks."""
    import torch

    from xhf_hooks import save_hf

    def build() -> Any:
        return odd_llama(tied=model_kind == 'tied', lora=model_kind == 'lora')

    model = shard(build(), kind)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    doors.train_steps(model, torch.optim.AdamW(trained, lr=1e-2))
    with torch.no_grad():
        model(**doors.batch())  # what it gathered for this, it keeps until the next step
    for writer in WRITERS:
        save_hf(model, root / writer, writer=writer, bucket_size=20_000, max_shard_size=20_000)
    save_hf(model, root / 'bf16', dtype='bfloat16')
    if model_kind == 'lora':
        save_hf(model, root / 'merged', lora='merge')
    save_whole(model, build(), root / 'theirs')


def untouched(kind: str, saves: bool, root: Path) -> dict[str, Any]:
    """The weights after some steps, with a save after each or without."""
    import torch

    from xhf_hooks import save_hf

    model = shard(odd_llama(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for writer in WRITERS:
        doors.train_steps(model, optimizer, steps=1)
        if saves:
            save_hf(model, root / 'untouched', writer=writer)
    return whole_state(model)


def memory(kind: str, writer: str, root: Path) -> tuple[int, int]:
    """Bytes that were saved, and extra memory of the busiest rank."""
    from xhf_hooks import save_hf

    model = shard(larger_llama(), kind)
    save_hf(model, root / 'memory', writer=writer, bucket_size='8MB')  # what the first save brings with it
    cost = save_hf(model, root / 'memory', writer=writer, bucket_size='8MB').cost
    return cost.nbytes, cost.peak_extra_nbytes


def flat_only(root: Path) -> str:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    from xhf_hooks import save_hf
    from xhf_hooks.errors import XhfError

    model = FullyShardedDataParallel(odd_llama(), device_id=torch.device('cpu'), use_orig_params=False)
    try:
        save_hf(model, root / 'flat')
    except XhfError as error:
        return str(error)
    return 'no error'


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('fsdp')
    scenarios: dict[str, Any] = {case: partial(save_case, *case.split('-'), root / case) for case in CASES}
    for kind in ('fsdp2', 'fsdp1'):
        scenarios |= {f'untouched-{kind}-{saves}': partial(untouched, kind, saves, root / kind) for saves in (0, 1)}
    scenarios |= {f'memory-{kind}-{writer}': partial(memory, kind, writer, root) for kind, writer in MEMORY}
    scenarios['flat_only'] = partial(flat_only, root)
    scenarios |= {name: partial(run, root / name) for name, run in RUNS.items()}
    return root, run_scenarios(scenarios, N_RANKS)


@pytest.mark.parametrize('case', CASES)
def test_every_writer_writes_what_the_whole_model_gives(results, case):
    root, outcomes = results
    check(outcomes, case)
    folder, is_lora = root / case, case.startswith('lora')
    for writer in WRITERS:
        assert_same_folder_tensors(folder / writer, folder / 'theirs')
        assert_whole(folder / writer)
    if not is_lora:
        assert_same_config(folder / 'gather', folder / 'theirs')
    rounded = folder_tensors(folder / 'bf16')
    assert all(tensor.bfloat16().equal(rounded[name]) for name, tensor in folder_tensors(folder / 'theirs').items())
    assert not is_lora or 'model.embed_tokens.weight' in folder_tensors(folder / 'merged')


@pytest.mark.parametrize('kind', ['fsdp2', 'fsdp1'])
def test_training_is_untouched(results, kind):
    _, outcomes = results
    without, with_saves = (check(outcomes, f'untouched-{kind}-{saves}')[0] for saves in (0, 1))
    assert without and all(tensor.equal(with_saves[name]) for name, tensor in without.items())


@pytest.mark.parametrize(('kind', 'writer'), MEMORY)
def test_memory_is_that_of_buckets_or_a_unit(results, kind, writer):
    _, outcomes = results
    nbytes, extra_nbytes = check(outcomes, f'memory-{kind}-{writer}')[0]
    assert nbytes > 100e6 and extra_nbytes < 0.45 * nbytes, (nbytes, extra_nbytes)


def test_flat_parameters_alone_are_refused(results):
    _, outcomes = results
    assert all('use_orig_params=True' in message for message in check(outcomes, 'flat_only'))


# Checkpoints


def run_of(results: Any, name: str) -> Path:
    check(results[1], name)
    return results[0] / name


@pytest.mark.parametrize('name', [*RUNS][:5])
def test_conversion_gives_the_hooks_bytes(results, name, tmp_path):
    folder = run_of(results, name)
    checkpoint, hook = folder / ('run' if 'strategy' in name else 'state'), folder / 'hook'
    if 'full' not in name:
        source = open_checkpoint(checkpoint)
        assert source.facts['engine'] == 'torch' and source.facts['layout'] == 'dcp'
        assert len(source.unproven) == 1 and 'not verifiable' in source.unproven[0]
    base = config_alone(hook, tmp_path / 'base')
    assert_same_files(convert(checkpoint, tmp_path / 'out', '--base', base, '--verify'), hook)
    assert verify([str(checkpoint), str(hook), '--base', str(base)]) == 0
    rounded = folder_tensors(convert(checkpoint, tmp_path / 'half', '--base', base, '--dtype', 'bfloat16'))
    assert all(rounded[name].equal(tensor.bfloat16()) for name, tensor in folder_tensors(hook).items())


def test_trainers_folder_needs_no_base(results, tmp_path):
    """``checkpoint-500`` of an FSDP run: Accelerate's folders, beside Trainer's config.json."""
    folder = run_of(results, 'accelerate_fsdp2_untied')
    checkpoint = tmp_path / 'checkpoint-500'
    shutil.copytree(folder / 'state', checkpoint)
    shutil.copy(folder / 'hook' / 'config.json', checkpoint)
    assert {path.name for path in checkpoint.iterdir()} == {'pytorch_model_fsdp_0', 'optimizer_0', 'config.json'}
    found = convert(checkpoint, tmp_path / 'out')
    assert_same_folder_tensors(found, folder / 'hook')
    assert json.loads((found / 'xhf_manifest.json').read_text())['iteration'] == 500
    with pytest.raises(CheckpointError, match=r"expected one model's state dict.*give the model's folder"):
        open_checkpoint(checkpoint / 'optimizer_0')


def test_lora_under_fsdp(results, tmp_path):
    folder = run_of(results, 'accelerate_fsdp2_lora')
    base = config_alone(folder / 'hook', tmp_path / 'base')
    model = config_alone(run_of(results, 'accelerate_fsdp2_untied') / 'hook', tmp_path / 'model')
    edit_json(base / 'adapter_config.json', base_model_name_or_path=str(model))
    found = convert(folder / 'state', tmp_path / 'out', '--base', base)
    assert_same_folder_tensors(found, folder / 'hook')


def test_who_reads_local_state_dicts(results):
    folder = run_of(results, 'strategy_local') / 'run'
    with pytest.raises(CheckpointError, match=r"one part of an FSDP.*load_state.*state_dict_cfg='full'") as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value) and '\n' not in str(caught.value)
