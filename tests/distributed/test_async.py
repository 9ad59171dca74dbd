"""Saves in the background: the weights of their step, errors that all ranks agree on, and no way to lose one."""

import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mmengine.hooks import CheckpointHook

from tests.helpers.checks.compare import folder_tensors
from tests.helpers.checks.converted import assert_same_files
from tests.helpers.faults.slow_disk import held_disk
from tests.helpers.models.zoo.llamas import larger_llama
from tests.helpers.ranks.scenarios import check, error_of, run_scenarios
from tests.helpers.runs.engines import save_folder, zero_engine
from tests.helpers.runs.hook_runs import log_dir_of, log_of, run, saves
from xhf_hooks.files import output_file
from xhf_hooks.files.writer import Writer

EVERY = dict(interval=1, by_epoch=False, max_keep_ckpts=-1)
LAST = 5
#: Name to (ZeRO stage, writer).
PAIRS = {'zero2_positional': (2, 'positional'), 'zero3_stream': (3, 'stream')}
WRITERS = ('positional', 'stream')


def held_up(work_dir: Path) -> str:
    """A run whose disk writes nothing of a save before the next iteration has been trained. Runs on: all ranks."""
    after_iteration = CheckpointHook.after_train_iter

    def note(self: CheckpointHook, runner: Any, *args: Any, **options: Any) -> None:
        if runner.iter + 1 == LAST:  # the hook that saves, and then waits for the save before, comes after this one
            may_write.set()
        after_iteration(self, runner, *args, **options)

    options = dict(hook=dict(EVERY, async_save=True, interval=LAST - 1), stage=3, max_iters=LAST)
    with held_disk() as may_write, mock.patch.object(CheckpointHook, 'after_train_iter', note):
        return run(options, work_dir)


def direct(root: Path) -> dict[str, int]:
    """By writer, how many bytes a save in the background wrote to the disk directly. Runs on: all ranks."""
    model = zero_engine(larger_llama().to(torch.bfloat16), 3).module
    write, found = output_file.write_directly, {}

    def count(*args: Any) -> range:
        written = write(*args)
        done.append(len(written))
        return written

    with mock.patch.object(output_file, 'write_directly', count):
        for writer in WRITERS:
            for in_background in (False, True):
                done: list[int] = []
                how = dict(writer=writer, in_background=in_background, bucket_size='128MB')
                save_folder(model, root / f'{writer}_{in_background}', **how)
                assert in_background or not done
                found[writer] = sum(done)
    return found


def failing(work_dir: Path) -> str:
    """The save of iteration 2 fails in the background, on rank 1: the error that ends training. Runs on: all ranks."""
    finish, calls = Writer.finish, []

    def fail_second(self: Any) -> Any:
        calls.append(self)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise OSError(5, 'injected')
        return finish(self)

    hook = dict(EVERY, async_save=True, on_error='raise')
    with mock.patch.object(Writer, 'finish', fail_second):
        return error_of(run, dict(hook=hook, stage=3, max_iters=LAST), work_dir)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('async')
    scenarios: dict[str, Any] = {}
    for name, (stage, writer) in PAIRS.items():
        for mode in (False, True):
            hook = dict(EVERY, writer=writer, async_save=mode)
            options = dict(hook=hook, stage=stage, max_iters=LAST)
            scenarios[f'{name}_{mode}'] = partial(run, options, root / f'{name}_{mode}')
    scenarios['goes_on'] = partial(held_up, root / 'goes_on')
    scenarios['failing'] = partial(failing, root / 'failing')
    return run_scenarios(scenarios, 2, root=root)


@pytest.mark.parametrize('name', PAIRS)
def test_same_files_as_without(finished, name):
    without, background = (log_dir_of(finished, f'{name}_{mode}') for mode in (False, True))
    assert saves(background) == saves(without)
    assert sorted(saves(background).values()) == [1, 2, 3, 4, LAST]
    for folder in saves(background):
        assert_same_files(background / folder, without / folder)


@pytest.fixture(scope='module')
def written_directly(tmp_path_factory):
    root = tmp_path_factory.mktemp('direct')
    return run_scenarios({'direct': partial(direct, root)}, 2, root=root)


@pytest.mark.needs('ext4 or XFS')
@pytest.mark.parametrize('writer', WRITERS)
def test_same_files_when_written_directly(written_directly, writer):
    written, root = [rank[writer] for rank in check(written_directly, 'direct')], written_directly.root
    assert_same_files(root / f'{writer}_True', root / f'{writer}_False')
    nbytes = (root / f'{writer}_False' / 'model.safetensors').stat().st_size
    # Slices of 512 KB, but for their ends, and not those of 256 KB; only a rank's own, which lie where they should
    assert (0.5 if writer == 'positional' else 0.25) * nbytes < sum(written) < nbytes
    assert (written[1] == 0) == (writer == 'stream')


def test_training_goes_on_and_the_weights_are_those_of_the_step(finished):
    """An iteration is trained before anything of the save of the one before is written."""
    log_dir, whole = log_dir_of(finished, 'goes_on'), log_dir_of(finished, 'zero3_stream_False')
    found = saves(log_dir)
    assert found == {'hf_model': LAST, f'hf_model_iter_{LAST - 1}': LAST - 1}
    expected = {number: folder for folder, number in saves(whole).items()}
    for folder, number in found.items():
        assert_same_files(log_dir / folder, whole / expected[number])
    first, last = (folder_tensors(whole / expected[number]) for number in (1, LAST))
    assert not any(first[key].equal(last[key]) for key in first), 'training moved too little to see a late read'
    told = re.findall(r'in [\d.]+ s\n +cost +training stalled for [\d.]+ s', log_of(log_dir))
    assert len(told) == len(found)


def test_an_error_in_the_background_ends_the_run_when_asked_to(finished):
    (message,) = {*check(finished, 'failing')}
    assert message.startswith('AgreedError') and 'failed on rank 1: OSError' in message, message
    (kept,) = (finished.root / 'failing').glob('*/hf_model')
    assert saves(kept.parent) == {'hf_model': 1}
