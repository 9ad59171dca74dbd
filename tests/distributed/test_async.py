"""Saves in the background: the weights of their step, errors that all ranks agree on, and no way to lose one."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.test_again import slow_disk
from tests.distributed.test_hook_runs import log_dir_of, log_of, run, saves
from tests.helpers.checks.compare import folder_tensors
from tests.helpers.ranks.launch import run_program
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs import ending_run
from tests.helpers.runs.engines import zero_engine

EVERY = dict(interval=1, by_epoch=False, max_keep_ckpts=-1)
LAST = 5
#: Name to (ZeRO stage, writer).
PAIRS = {'zero2_positional': (2, 'positional'), 'zero3_stream': (3, 'stream')}
WRITERS = ('positional', 'stream')
ENDS = ('exception', 'sigterm')
WRITE_SECS = 0.04
N_WRITES = 21  # one tensor each


def slowed(work_dir: Path) -> str:
    """A run on a disk that takes several iterations for a save. Runs on: all ranks."""
    with slow_disk(WRITE_SECS):
        return run(dict(hook=dict(EVERY, async_save=True, interval=LAST - 1), stage=3, max_iters=LAST), work_dir)


def direct(root: Path) -> dict[str, int]:
    """Save slices that are large enough to go to the disk directly. Runs on: all ranks.

    Returns:
        By writer, how many bytes went there so, of the save in the background.
    """
    import torch

    from tests.helpers.models.zoo.llamas import larger_llama
    from tests.helpers.runs.engines import make_saver
    from xhf_hooks.collective import Collective
    from xhf_hooks.places.checkpoint_folder import CheckpointFolder
    from xhf_hooks.planning.types import Step
    from xhf_hooks.writers import output_file

    model = zero_engine(larger_llama().to(torch.bfloat16), 3).module
    write, done = output_file.write_directly, [0]

    def count(*args: Any) -> range:
        written = write(*args)
        done.append(len(written))
        return written

    found = {}
    with mock.patch.object(output_file, 'write_directly', count):
        for writer in WRITERS:
            waited = make_saver(model, Collective(), writer=writer)
            done[:] = [0]
            waited.save(CheckpointFolder(root / f'{writer}_waited', 1), Step('iter', 1, 1))
            waited.close()
            assert done == [0]
            saver = make_saver(model, Collective(), writer=writer, in_background=True)
            saver.start(CheckpointFolder(root / f'{writer}_background', 1), Step('iter', 1, 1)).result()
            saver.close()
            found[writer] = sum(done)
    return found


def failing(work_dir: Path) -> str:
    """The save of iteration 2 fails in the background, on rank 1: the error that ends training. Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks.errors import AgreedError
    from xhf_hooks.writers.writer import Writer

    finish, calls = Writer.finish, []

    def fail_second(self: Any) -> Any:
        calls.append(self)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise OSError(5, 'injected')
        return finish(self)

    hook = dict(EVERY, async_save=True, on_error='raise')
    with mock.patch.object(Writer, 'finish', fail_second), pytest.raises(AgreedError) as caught:
        run(dict(hook=hook, stage=3, max_iters=LAST), work_dir)
    return str(caught.value)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('async')
    scenarios: dict[str, Any] = {}
    for name, (stage, writer) in PAIRS.items():
        for mode in (False, True):
            hook = dict(EVERY, writer=writer, async_save=mode)
            options = dict(hook=hook, stage=stage, max_iters=LAST)
            scenarios[f'{name}_{mode}'] = partial(run, options, root / f'{name}_{mode}')
    scenarios['goes_on'] = partial(slowed, root / 'goes_on')
    scenarios['direct'] = partial(direct, root / 'direct')
    scenarios['failing'] = partial(failing, root / 'failing')
    return root, run_scenarios(scenarios, 2)


def files_of(folder: Path) -> dict[str, bytes]:
    """All of it but the manifest, which says how long the save took and who wrote it."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != 'xhf_manifest.json'}


@pytest.mark.parametrize('name', PAIRS)
def test_same_files_as_without(finished, name):
    without, background = (log_dir_of(finished, f'{name}_{mode}') for mode in (False, True))
    assert saves(background) == saves(without)
    assert sorted(saves(background).values()) == [1, 2, 3, 4, LAST]
    for folder in saves(background):
        assert files_of(background / folder) == files_of(without / folder)


@pytest.mark.parametrize('writer', WRITERS)
def test_same_files_when_written_directly(finished, writer):
    written, root = [rank[writer] for rank in check(finished[1], 'direct')], finished[0] / 'direct'
    assert files_of(root / f'{writer}_background') == files_of(root / f'{writer}_waited')
    if not written[0]:
        pytest.skip(f'NOT TESTED: {root} is not on ext4 or XFS')
    nbytes = (root / f'{writer}_waited' / 'model.safetensors').stat().st_size
    # Slices of 512 KB, but for their ends, and not those of 256 KB; only a rank's own, which lie where they should
    assert (0.5 if writer == 'positional' else 0.25) * nbytes < sum(written) < nbytes
    assert (written[1] == 0) == (writer == 'stream')


def test_training_goes_on_and_the_weights_are_those_of_the_step(finished):
    """An iteration is trained over a slow disk, while the save of the one before is in flight."""
    log_dir, whole = log_dir_of(finished, 'goes_on'), log_dir_of(finished, 'zero3_stream_False')
    found = saves(log_dir)
    assert found == {'hf_model': LAST, f'hf_model_iter_{LAST - 1}': LAST - 1}
    expected = {number: folder for folder, number in saves(whole).items()}
    for folder, number in found.items():
        assert files_of(log_dir / folder) == files_of(whole / expected[number])
    first, last = (folder_tensors(whole / expected[number]) for number in (1, LAST))
    assert not any(first[key].equal(last[key]) for key in first), 'training moved too little to see a late read'


def test_training_stands_still_for_the_copy_alone(finished):
    pattern = re.compile(r'in ([\d.]+) s\n +cost +training stalled for ([\d.]+) s')
    times = [(float(a), float(b)) for a, b in pattern.findall(log_of(log_dir_of(finished, 'goes_on')))]
    slow_secs = N_WRITES * WRITE_SECS
    assert times and all(seconds >= slow_secs and stalled < seconds for seconds, stalled in times), times


def test_an_error_in_the_background_ends_the_run_when_asked_to(finished):
    (message,) = {*check(finished[1], 'failing')}
    assert 'failed on rank 1: OSError' in message, message
    (kept,) = (finished[0] / 'failing').glob('*/hf_model')
    assert saves(kept.parent) == {'hf_model': 1}


@pytest.mark.parametrize('how', ENDS)
def test_a_process_that_ends_finishes_its_save(how, tmp_path):
    ended = run_program(ending_run.__file__, tmp_path / 'run', how, world_size=2)
    output = '\n'.join(rank.stdout + rank.stderr for rank in ended)
    assert all(rank.returncode != 0 for rank in ended), output
    assert 'waiting for a save in the background' in output, output[-5000:]
    (folder,) = (tmp_path / 'run').glob('*/hf_model')
    assert saves(folder.parent) == {'hf_model': ending_run.ENDS_AT - 1}, output[-5000:]
    assert folder_tensors(folder)
    pointer = json.loads((tmp_path / 'run' / 'stored' / 'hf_model.json').read_text())
    assert pointer['step']['number'] == ending_run.ENDS_AT - 1, 'it is uploaded, too'
    log = log_of(folder.parent)  # the command of the first save is ended, its supervisor perhaps while it starts
    assert 'on_saved for hf_model, iter_1 failed' in log or 'on_saved for hf_model, iter_1 was cancelled' in log
    outputs = folder.parent / 'hf_model_on_saved'
    assert not (outputs / f'iter_{ending_run.ENDS_AT - 1}').exists(), 'no command starts while the save is awaited'
    assert [path.name for path in folder.parent.iterdir() if 'kept' in path.name] == []


def test_a_save_whose_process_group_is_destroyed_tells_its_end(tmp_path):
    """As scripts do in a ``finally``, before the interpreter exits and waits for the save."""
    ended = run_program(ending_run.__file__, tmp_path / 'run', 'destroyed', world_size=2)
    assert [rank.returncode for rank in ended] == [1, 1]
    output, step = ended[0].stdout + ended[0].stderr, f'iter_{ending_run.ENDS_AT - 1}'
    was_saved, failed = f'saved {step} to' in output, f'the save of {step} in the background failed: ' in output
    assert was_saved != failed, output[-5000:]
    (folder,) = (tmp_path / 'run').glob('*/hf_model')
    assert saves(folder.parent) == {'hf_model': ending_run.ENDS_AT - 1 if was_saved else 1}, output[-5000:]
    assert failed or f'{step} is saved, but its upload and on_saved were not begun: ' in output, output[-5000:]
