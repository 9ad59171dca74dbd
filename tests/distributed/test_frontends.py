"""save_hf and the Trainer callback on real ranks: their bytes are those of Accelerate and Trainer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs import frontends as doors
from tests.helpers.runs.zero_config import zero_config

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
        dict(save_strategy='steps', save_steps=2, max_keep_ckpts=-1, save_last=False),
        dict(max_steps=5),
        zero_config(3),
        ['hf_model', 'hf_model_iter_2'],
    ),
    'epochs': (
        dict(save_strategy='epoch', max_keep_ckpts=-1, async_save=True),
        dict(max_steps=16, save_strategy='steps', save_steps=16),
        zero_config(2),
        ['checkpoint-16', 'hf_model', 'hf_model_iter_8'],
    ),
    'at_the_end': (dict(dtype='float32'), {}, zero_config(3), ['hf_model']),
    'trackers': (
        dict(save_strategy='steps', save_steps=3, on_saved=['echo', '{"acc": 0.5}']),
        dict(report_to=['tensorboard'], logging_steps=1),
        zero_config(3),
        ['hf_model', 'hf_model_on_saved', 'runs'],
    ),
}


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('doors')
    scenarios: dict[str, Any] = {
        name: partial(doors.trainer_run, options, {'lr_scheduler_type': 'constant', **arguments}, zero, root / name)
        for name, (options, arguments, zero, _) in TRAINER.items()
    }
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


def test_trackers_get_the_numbers_of_each_save(results):
    """At the step of the save, the last one too, and beside what Trainer itself reports."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root, outcomes = results
    check(outcomes, 'trackers')
    (events,) = (root / 'trackers' / 'runs').rglob('events.*')
    told = EventAccumulator(str(events))
    told.Reload()
    steps = {tag: [event.step for event in told.Scalars(tag)] for tag in told.Tags()['scalars']}
    assert steps['train/hf_checkpoint/seconds'] == steps['train/hf_checkpoint/write_seconds'] == [3, 4]
    assert steps['train/on_saved/hf_model/acc'][-1] == 4
    assert steps['train/loss'] == [1, 2, 3, 4]
    state = json.loads((root / 'gather' / 'checkpoint-4' / 'trainer_state.json').read_text())
    assert [line['step'] for line in state['log_history'] if 'hf_checkpoint/seconds' in line] == [2]


def test_ddp(results):
    root, outcomes = results
    check(outcomes, 'ddp')
    for way in (*WRITERS, 'bare'):
        assert_same_folder_tensors(root / 'ddp' / way, root / 'ddp' / 'theirs')
