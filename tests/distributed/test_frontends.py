"""save_hf and the Trainer callback on real ranks: their bytes are those of Accelerate, Trainer and zero_to_fp32."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import frontends as doors
from tests.helpers.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.scenarios import check, run_scenarios
from tests.helpers.zero_config import zero_config
from tests.helpers.zoo.llamas import odd_llama

WRITERS = ('stream', 'parallel', 'positional')


def gathering_config(stage: int, gather: bool) -> dict[str, Any]:
    """With or without what Accelerate and Trainer need for weights of their own."""
    return zero_config(stage, **(dict(stage3_gather_16bit_weights_on_model_save=gather) if stage == 3 else {}))


def accelerate_at(stage: int, root: Path) -> dict[str, Any]:
    """Train a step, then save by each writer, as Accelerate does, and for zero_to_fp32."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator, DeepSpeedPlugin

    from xhf_hooks import save_hf

    with doors.fresh_accelerate(ACCELERATE_USE_DEEPSPEED='true'):
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=gathering_config(stage, True)))
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
            save_hf(model, root / 'float32' / writer, writer=writer, dtype='float32')
        state = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            root / 'theirs', is_main_process=dist.get_rank() == 0, state_dict=state
        )
        model.save_checkpoint(str(root / 'zero'))
        model.destroy()
        dist.barrier()
    return told


def trainer_run(options: dict[str, Any], arguments: dict[str, Any], stage: int, gather: bool, root: Path) -> list[str]:
    """Returns what is in output_dir at the end."""
    import torch
    import torch.distributed as dist
    from transformers import Trainer, TrainingArguments

    from xhf_hooks.integrations.transformers import HFCheckpointCallback

    torch.manual_seed(0)
    with doors.fresh_accelerate(ACCELERATE_USE_DEEPSPEED='true'):
        args = TrainingArguments(
            output_dir=str(root),
            use_cpu=True,
            bf16=True,
            ddp_backend='gloo',
            per_device_train_batch_size=1,
            report_to=[],
            disable_tqdm=True,
            deepspeed=gathering_config(stage, gather),
            **{'max_steps': 4, **arguments},
        )
        model = odd_llama()
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=doors.Sequences(),
            optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-2), None),
            callbacks=[HFCheckpointCallback(**options)],
        )
        trainer.train()
        trainer.model_wrapped.destroy()
    dist.barrier()
    return sorted(path.name for path in root.iterdir())


def in_ddp(lora: bool, root: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from xhf_hooks import save_hf

    model = odd_llama(lora=lora)
    wrapped = DistributedDataParallel(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    doors.train_steps(wrapped, torch.optim.AdamW(trained, lr=1e-2))
    for writer in WRITERS:
        save_hf(wrapped, root / writer, writer=writer)
    save_hf(model, root / 'bare')
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'theirs')


def wrong_options(root: Path) -> list[str]:
    """What each rank is told."""
    import torch

    from xhf_hooks import save_hf
    from xhf_hooks.errors import XhfError

    model, told = odd_llama(), []
    (root / 'foreign').mkdir(parents=True, exist_ok=True)
    (root / 'foreign' / 'thesis.tex').write_text('mine')
    for arguments in (
        dict(out_dir=None),
        dict(out_dir=root / 'x', max_keep_ckpts=2),
        dict(out_dir=root / 'x', step=-1),
        dict(out_dir=root / 'x', writer='fast'),
        dict(out_dir=root / 'x', lora='merge'),
        dict(out_dir=root / 'foreign'),
    ):
        try:
            save_hf(model, **arguments)
        except XhfError as error:
            told.append(str(error))
    try:
        save_hf(torch.nn.Linear(2, 2), root / 'x')
    except XhfError as error:
        told.append(str(error))
    return told


TRAINER = {
    'gather': (dict(), dict(save_strategy='steps', save_steps=2), 3, True),
    'no_gather': (dict(writer='stream'), dict(save_strategy='steps', save_steps=3), 3, False),
    'zero2': (dict(async_save=True), dict(save_strategy='steps', save_steps=2), 2, False),
    'own_schedule': (
        dict(save_strategy='steps', save_steps=2, max_keep_ckpts=-1, save_last=False),
        dict(save_strategy='no', max_steps=5),
        3,
        False,
    ),
    'epochs': (dict(save_strategy='epoch', max_keep_ckpts=-1), dict(save_strategy='no', max_steps=16), 3, False),
    'at_the_end': (dict(dtype='float32'), dict(save_strategy='no'), 3, False),
}


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('doors')
    scenarios = {f'accelerate{stage}': partial(accelerate_at, stage, root / f'accelerate{stage}') for stage in (2, 3)}
    scenarios |= {f'trainer_{name}': partial(trainer_run, *run, root / name) for name, run in TRAINER.items()}
    scenarios |= {'ddp': partial(in_ddp, False, root / 'ddp'), 'ddp_lora': partial(in_ddp, True, root / 'ddp_lora')}
    scenarios['wrong'] = partial(wrong_options, root / 'wrong')
    return root, run_scenarios(scenarios, 2)


@pytest.mark.parametrize('stage', (2, 3))
def test_accelerate_writes_the_same(results, stage):
    root, outcomes = results
    folder = root / f'accelerate{stage}'
    both = check(outcomes, f'accelerate{stage}')
    for told in both:
        for writer in WRITERS:
            nbytes = sum(tensor.nbytes for tensor in folder_tensors(folder / writer).values())
            path, said, took_time = told[writer]
            assert (path, took_time) == (str(folder / writer), True) and 0 <= said - nbytes < 20_000
            assert_same_folder_tensors(folder / writer, folder / 'theirs')
            doors.verify_folder(folder / writer)


@pytest.mark.parametrize('stage', (2, 3))
def test_zero_to_fp32_gives_the_same(results, stage):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    root, outcomes = results
    check(outcomes, f'accelerate{stage}')
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(root / f'accelerate{stage}' / 'zero'))
    for writer in WRITERS:
        ours = folder_tensors(root / f'accelerate{stage}' / 'float32' / writer)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.equal(theirs[name]), name
        assert any(not tensor.equal(tensor.bfloat16().float()) for tensor in ours.values()), 'nothing was trained'


def test_trainer_writes_the_same(results):
    root, outcomes = results
    assert check(outcomes, 'trainer_gather')[0] == ['checkpoint-2', 'checkpoint-4', 'hf_model']
    assert_same_folder_tensors(root / 'gather' / 'hf_model', root / 'gather' / 'checkpoint-4')


def test_trainer_without_the_gather_flag(results):
    """It writes no weights; the last save is at step 4, where it saves a checkpoint, too, and the same as with it."""
    root, outcomes = results
    assert check(outcomes, 'trainer_no_gather')[0] == ['checkpoint-3', 'checkpoint-4', 'hf_model']
    assert not (root / 'no_gather' / 'checkpoint-4' / 'model.safetensors').exists()
    check(outcomes, 'trainer_gather')
    assert_same_folder_tensors(root / 'no_gather' / 'hf_model', root / 'gather' / 'hf_model')


def test_trainer_saves_in_the_background(results):
    root, outcomes = results
    check(outcomes, 'trainer_zero2')
    assert_same_folder_tensors(root / 'zero2' / 'hf_model', root / 'zero2' / 'checkpoint-4')


def test_schedule_of_the_callback(results):
    """With save_strategy 'no' Trainer writes nothing at all."""
    root, outcomes = results
    assert check(outcomes, 'trainer_own_schedule')[0] == ['hf_model', 'hf_model_iter_2']
    assert check(outcomes, 'trainer_epochs')[0] == ['hf_model', 'hf_model_iter_8']
    assert check(outcomes, 'trainer_at_the_end')[0] == ['hf_model']
    for name, step in (('own_schedule', 4), ('epochs', 16), ('at_the_end', 4)):
        import json

        manifest = json.loads((root / name / 'hf_model' / 'xhf_manifest.json').read_text())
        assert (manifest['iteration'], manifest['engine'], manifest['zero_stage']) == (step, 'deepspeed', 3)
    masters = folder_tensors(root / 'at_the_end' / 'hf_model')
    check(outcomes, 'trainer_gather')
    rounded = folder_tensors(root / 'gather' / 'hf_model')
    assert all(tensor.bfloat16().equal(rounded[name]) for name, tensor in masters.items())


@pytest.mark.parametrize('name', ('ddp', 'ddp_lora'))
def test_ddp(results, name):
    root, outcomes = results
    check(outcomes, name)
    for way in (*WRITERS, 'bare'):
        assert_same_folder_tensors(root / name / way, root / name / 'theirs')


def test_wrong_options_are_errors_on_all_ranks(results):
    root, outcomes = results
    for told in check(outcomes, 'wrong'):
        expected = ('out_dir', 'step', 'step', 'writer', 'lora', 'files that this package did not write', 'no exporter')
        assert len(told) == len(expected)
        for message, part in zip(told, expected, strict=True):
            assert part in message
    assert not (root / 'wrong' / 'x').exists()
