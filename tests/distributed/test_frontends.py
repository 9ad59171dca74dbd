"""save_hf and the Trainer callback on real ranks: their bytes are those of Accelerate and Trainer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs import frontends as doors
from tests.helpers.runs.zero_config import zero_config
from xhf_hooks import HFCheckpointCallback
from xhf_hooks.places.checkpoint_folder import CheckpointFolder

WRITERS = ('stream', 'parallel', 'positional')
#: What Accelerate and Trainer need for weights of their own.
GATHER = zero_config(3, stage3_gather_16bit_weights_on_model_save=True)


def accelerated(root: Path) -> dict[str, Any]:
    """Train a step, then save by each writer and as Accelerate does."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator, DeepSpeedPlugin

    from xhf_hooks import save_hf

    with doors.fresh_accelerate(ACCELERATE_USE_DEEPSPEED='true'):
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=GATHER))
        model = odd_llama()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for _ in range(2):
            accelerator.backward(model(**doors.batch()).loss)
            optimizer.step()
            optimizer.zero_grad()
        told = {}
        for writer in WRITERS:
            committed = save_hf(model, root / writer, writer=writer, step=2, bucket_size=20_000)
            told[writer] = (str(committed.path), committed.cost.nbytes, committed.cost.seconds > 0)
        state = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            root / 'theirs', is_main_process=dist.get_rank() == 0, state_dict=state
        )
        model.destroy()
        dist.barrier()
    return told


def beside_foreign_files(root: Path) -> str:
    """During the save somebody puts files under its name: where the save is. Runs on: all ranks."""
    from xhf_hooks import save_hf

    commit = CheckpointFolder.commit

    def commit_late(folder: CheckpointFolder, *args: Any, **options: Any) -> Path:
        folder.path.mkdir()
        (folder.path / 'notes.txt').touch()
        return commit(folder, *args, **options)

    with mock.patch.object(CheckpointFolder, 'commit', commit_late):
        return str(save_hf(odd_llama(), root / 'hf_model', step=1).path)


def in_ddp(root: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from xhf_hooks import save_hf

    model = odd_llama()
    wrapped = DistributedDataParallel(model)
    doors.train_steps(wrapped, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for writer in WRITERS:
        save_hf(wrapped, root / writer, writer=writer)
    save_hf(model, root / 'bare')
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'theirs')


def doubled_at_the_end(root: Path) -> list[dict[str, Any]]:
    """Train where another callback changes the weights after the last step was saved; returns ``log_history``."""
    import torch.distributed as dist

    with doors.fresh_accelerate(ACCELERATE_USE_DEEPSPEED='true'):
        trainer = doors.make_trainer(
            root,
            None,
            doors.Doubling(),
            HFCheckpointCallback(async_save=True, on_saved=['echo', '{"acc": 0.5}']),
            bf16=True,
            deepspeed=GATHER,
            logging_steps=1,
            save_strategy='steps',
            save_steps=3,
        )
        trainer.train()
        trainer.save_model(str(root / 'theirs'))
        trainer.model_wrapped.destroy()
    dist.barrier()
    return trainer.state.log_history


#: Options of the callback, arguments of Trainer, DeepSpeed's config, and what is in output_dir at the end.
TRAINER: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = {
    'gather': (
        dict(),
        dict(save_strategy='steps', save_steps=2),
        GATHER,
        ['checkpoint-2', 'checkpoint-4', 'hf_model'],
    ),
    # Trainer itself writes nothing at all
    'own_schedule': (
        dict(save_strategy='steps', save_steps=2, save_total_limit=None, save_last=False),
        dict(max_steps=5),
        zero_config(3),
        ['hf_model', 'hf_model_iter_2'],
    ),
    'save_at': (
        dict(save_strategy='steps', save_steps=3, save_at=[1, 3, 4], save_total_limit=None, save_last=False),
        dict(max_steps=5),
        zero_config(3),
        ['hf_model', 'hf_model_iter_1', 'hf_model_iter_3'],
    ),
    'epochs': (
        dict(save_strategy='epoch', save_total_limit=None, async_save=True),
        dict(max_steps=16, save_strategy='steps', save_steps=16),
        zero_config(2),
        ['checkpoint-16', 'hf_model', 'hf_model_iter_8'],
    ),
    'at_the_end': (dict(dtype='float32'), {}, zero_config(3), ['hf_model']),
}


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('doors')
    scenarios: dict[str, Any] = {
        name: partial(doors.trainer_run, options, {'lr_scheduler_type': 'constant', **arguments}, zero, root / name)
        for name, (options, arguments, zero, _) in TRAINER.items()
    }
    scenarios['doubled'] = partial(doubled_at_the_end, root / 'doubled')
    scenarios['foreign files'] = partial(beside_foreign_files, root / 'foreign')
    scenarios |= {'ddp': partial(in_ddp, root / 'ddp'), 'accelerate': partial(accelerated, root / 'accelerate')}
    return root, run_scenarios(scenarios, 2)


def test_accelerate_writes_the_same(results):
    root, outcomes = results
    for told in check(outcomes, 'accelerate'):
        for writer in WRITERS:
            folder = root / 'accelerate' / writer
            nbytes = sum(tensor.nbytes for tensor in folder_tensors(folder).values())
            path, said, took_time = told[writer]
            assert (path, took_time) == (str(folder), True) and 0 <= said - nbytes < 20_000
            assert_same_folder_tensors(folder, root / 'accelerate' / 'theirs')
            assert_whole(folder)


@pytest.mark.parametrize('name', TRAINER)
def test_schedule_of_the_callback(results, name):
    root, outcomes = results
    *_, zero, expected = TRAINER[name]
    assert check(outcomes, name)[0] == expected
    manifest = json.loads((root / name / 'hf_model' / 'xhf_manifest.json').read_text())
    found = manifest['iteration'], manifest['engine'], manifest['zero_stage']
    assert found == (16 if name == 'epochs' else 4, 'deepspeed', zero['zero_optimization']['stage'])


def test_trainer_writes_the_same(results):
    """Whether it may gather the weights for itself or not, and whatever the callback's options."""
    root, outcomes = results
    for name in TRAINER:
        check(outcomes, name)
    for name, step in (('gather', 4), ('epochs', 16)):
        assert_same_folder_tensors(root / name / 'hf_model', root / name / f'checkpoint-{step}')
    expected = folder_tensors(root / 'gather' / 'hf_model')
    for name in ('own_schedule', 'at_the_end'):
        found = folder_tensors(root / name / 'hf_model')
        assert found.keys() == expected.keys()
        assert all(tensor.bfloat16().equal(expected[key]) for key, tensor in found.items())


def test_what_another_callback_makes_of_the_weights_is_saved(results):
    """The last step is saved again if the weights were changed since: by a callback that is listed before ours."""
    root, outcomes = results
    check(outcomes, 'doubled')
    assert_same_folder_tensors(root / 'doubled' / 'hf_model', root / 'doubled' / 'theirs')
    saved = folder_tensors(root / 'doubled' / 'hf_model')
    before = folder_tensors(root / 'doubled' / 'checkpoint-4')
    assert all(tensor.equal(2 * before[name]) for name, tensor in saved.items())


def test_log_history_has_the_numbers_of_saves(results):
    """On rank 0, with step and epoch as in Trainer's own entries, and before its summary of training."""
    _, outcomes = results
    rank0, rank1 = check(outcomes, 'doubled')
    of_saves = [(entry['step'], entry['epoch']) for entry in rank0 if 'hf_checkpoint/seconds' in entry]
    epochs = {entry['step']: entry['epoch'] for entry in rank0 if 'loss' in entry}
    assert of_saves == [(step, epochs[step]) for step in (3, 4, 4)]
    of_commands = [entry for entry in rank0 if 'on_saved/hf_model/acc' in entry]
    assert of_commands[-1] == {'on_saved/hf_model/acc': 0.5, 'epoch': epochs[4], 'step': 4}
    assert 'train_loss' in rank0[-1] and 'epoch' in rank0[-1]
    assert rank1[-1].keys() == rank0[-1].keys() and not any('hf_checkpoint/seconds' in entry for entry in rank1)


def test_ddp(results):
    root, outcomes = results
    check(outcomes, 'ddp')
    for way in (*WRITERS, 'bare'):
        assert_same_folder_tensors(root / 'ddp' / way, root / 'ddp' / 'theirs')


def test_all_ranks_know_where_a_save_is_that_found_foreign_files_under_its_name(results):
    root, outcomes = results
    folder = root / 'foreign' / 'hf_model_iter_1'
    assert check(outcomes, 'foreign files') == [str(folder)] * 2
    assert_whole(folder)
