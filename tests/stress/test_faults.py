"""One rank fails, in each stage: all ranks report the same, nobody hangs, nothing is lost.

Calls to the file system that fail are in test_fault_layer.py.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import pytest

from tests.helpers.assert_intact import assert_whole
from tests.helpers.compare import assert_loads_clean, assert_same_folder_tensors
from tests.helpers.engines import zero_engine
from tests.helpers.scenarios import check, run_scenarios

#: Stage to (what is made to fail, on which ranks it runs, the writer).
STAGES = {
    'specs': ('xhf_hooks.sources.zero3.Zero3Source.specs', 'any', 'stream'),
    'spread': ('xhf_hooks.sources.zero3.Zero3Source.spread', 'any', 'stream'),
    'plan': ('xhf_hooks.save.make_plan', 'any', 'stream'),
    'gather': ('xhf_hooks.sources.zero3.Zero3Source._gather_partitions', 'any', 'gather'),
    'check': ('xhf_hooks.sources.read.made_from', 'rank 0', 'gather'),
    'slice': ('xhf_hooks.sources.zero3.Zero3Source.local_shard', 'any', 'stream'),
    'slice_of_all': ('xhf_hooks.sources.zero3.Zero3Source.local_shard', 'any', 'parallel'),
    'pack': ('xhf_hooks.sources.send._fill', 'last', 'stream'),
    'buffers': ('xhf_hooks.sources.send.SliceSender._make_buffers', 'any', 'stream'),
    'room': ('xhf_hooks.host_memory.BufferPool.take', 'rank 0', 'stream'),
    'room_of_all': ('xhf_hooks.host_memory.BufferPool.take', 'any', 'parallel'),
    'write_of_all': ('xhf_hooks.writers.output_file.OutputFile.write', 'any', 'parallel'),
}
#: Stage to how many calls of that are fine.
FINE_BEFORE = {'room': 2, 'room_of_all': 2, 'pack': 1}
WORLD_SIZE = 3
ROOM_FOR_MANIFEST = 16 * 1024  # bytes; the weights need ten times as many


def cases() -> dict[str, tuple[str, int]]:
    """Name to (stage, failing rank): a stage that only rank 0 runs fails there, another on the last rank, too."""
    found = {}
    for stage, (_, where, _) in STAGES.items():
        ranks = {'rank 0': (0,), 'last': (WORLD_SIZE - 1,), 'any': (0, WORLD_SIZE - 1)}[where]
        found.update({f'{stage}_on_rank{rank}': (stage, rank) for rank in ranks})
    return found


CASES = cases()


def failing_after(n_fine: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which fails from then on."""
    calls = itertools.count()

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) < n_fine:
            return function(*args, **options)
        raise OSError(5, 'injected')

    return call


def fail_once(stage: str, failing_rank: int, root: Path) -> dict[str, Any]:
    """Save; save again while one rank fails; save a third time. Runs on: all ranks."""
    import torch.distributed as dist

    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks.collective import Collective
    from xhf_hooks.errors import AgreedError
    from xhf_hooks.integrity.manifest import read_commit
    from xhf_hooks.model import unwrap
    from xhf_hooks.options import SaveOptions
    from xhf_hooks.places.checkpoint_folder import CheckpointFolder
    from xhf_hooks.planning.types import Step
    from xhf_hooks.save import Saver

    model = odd_llama(tied=True, bf16=True)
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'expected')
    engine = zero_engine(model, stage=3)
    collective = Collective(timeout_secs=60)
    what, _, writer = STAGES[stage]
    saver = Saver(unwrap(engine), SaveOptions(bucket_size=10_000, max_shard_size=30_000), collective, writer=writer)
    folder = CheckpointFolder(root / 'hf_model', max_keep=1)
    with collective.stage('claim'):
        saver.prepare()
        if dist.get_rank() == 0:
            folder.claim()
    saver.save(folder, Step('iter', 1, 1))
    if stage in ('plan', 'spread'):  # a save plans anew only when the model has changed
        next(engine.module.parameters()).requires_grad_(False)
    failing = mock.patch(what, failing_after(FINE_BEFORE.get(stage, 0), resolve_name(what)))
    if dist.get_rank() == failing_rank:
        failing.start()
    try:
        saver.save(folder, Step('iter', 2, 2))
        message = 'no error'
    except AgreedError as error:
        message = str(error)
    if dist.get_rank() == failing_rank:
        failing.stop()
    dist.barrier()  # rank 0 has cleared what it staged
    kept = read_commit(folder.final).step
    leftovers = sorted(path.name for path in root.iterdir())
    dist.barrier()
    saver.save(folder, Step('iter', 3, 3))
    folder.release()
    collective.close()
    engine.destroy()
    then = read_commit(folder.final).step.number
    return {'message': message, 'kept': kept.number, 'leftovers': leftovers, 'then': then}


def other_model_on_one_rank(root: Path) -> str:
    """Runs on: all ranks."""
    import torch.distributed as dist

    from tests.helpers.engines import save_folder
    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks.errors import PlanError

    model = odd_llama(tied=dist.get_rank() == 1)
    with pytest.raises(PlanError) as caught:
        save_folder(model, root / 'hf_model')
    return str(caught.value)


def full_disk_in_the_middle(disk: Path, can_reserve: bool) -> dict[str, Any]:
    """The disk fills up while a save is written. Runs on: all ranks.

    Args:
        can_reserve: The file system can give a file its room before it is written; else fallocate says that it cannot.
    """
    import torch.distributed as dist

    from tests.helpers.engines import save_folder
    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks.errors import AgreedError
    from xhf_hooks.integrity.manifest import read_commit
    from xhf_hooks.writers.writer import Writer

    engine = zero_engine(odd_llama(bf16=True), stage=3)
    save_folder(engine.module, disk / 'hf_model')

    def fill_disk_and_write(self: Writer, chunk: Any) -> None:
        if next(n_written) == 1:
            _fill(disk, leave_nbytes=ROOM_FOR_MANIFEST)
        write(self, chunk)

    write, n_written = Writer.write, itertools.count()
    reserving = nullcontext() if can_reserve else mock.patch('xhf_hooks.system.fallocate.function', None)
    with mock.patch.object(Writer, 'write', fill_disk_and_write), reserving:
        try:
            save_folder(engine.module, disk / 'hf_model')
            message = 'no error'
        except AgreedError as error:
            message = str(error)
    dist.barrier()
    if dist.get_rank() == 0:
        (disk / 'filler').unlink()
        assert_whole(disk / 'hf_model')
    engine.destroy()
    return {'message': message, 'kept': read_commit(disk / 'hf_model').step, 'free': os.statvfs(disk).f_bavail}


def _fill(disk: Path, leave_nbytes: int) -> None:
    with (disk / 'filler').open('wb', buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(file.tell() - leave_nbytes)


@pytest.fixture(scope='module')
def small_disk(tmp_path_factory):
    """A real file system of 1 MB."""
    import subprocess

    disk = tmp_path_factory.mktemp('small_disk')
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', disk], check=True)
    yield disk
    subprocess.run(['umount', disk], check=True)


@pytest.fixture(scope='module')
def failed(tmp_path_factory, small_disk):
    root = tmp_path_factory.mktemp('faults')
    scenarios = {name: partial(fail_once, stage, rank, root / name) for name, (stage, rank) in CASES.items()}
    scenarios |= {
        'other_model': partial(other_model_on_one_rank, root),
        'full_disk': partial(full_disk_in_the_middle, small_disk, can_reserve=False),
        'full_disk_but_reserved': partial(full_disk_in_the_middle, small_disk, can_reserve=True),
    }
    return root, run_scenarios(scenarios, WORLD_SIZE)


@pytest.mark.parametrize('name', CASES)
def test_every_rank_reports_the_same_and_nothing_is_lost(failed, name):
    from transformers import LlamaForCausalLM

    root, results = failed
    _, failing_rank = CASES[name]
    reports = check(results, name)
    messages = {report['message'] for report in reports}
    assert len(messages) == 1, messages
    message = messages.pop()
    assert f'rank {failing_rank}: OSError' in message and 'injected' in message
    assert all(f'rank {other}:' not in message for other in range(WORLD_SIZE) if other != failing_rank)
    assert {report['kept'] for report in reports} == {1}
    assert not any(name.startswith('.hf_model.staging') for report in reports for name in report['leftovers'])
    assert {report['then'] for report in reports} == {3}
    assert_same_folder_tensors(root / name / 'expected', root / name / 'hf_model')
    assert_loads_clean(root / name / 'hf_model', LlamaForCausalLM)


def test_different_models_are_named_on_both_sides(failed):
    messages = set(check(failed[1], 'other_model'))
    assert len(messages) == 1
    assert 'differs between ranks 0 and [1]' in messages.pop()


def test_full_disk_keeps_the_previous_save(failed):
    reports = check(failed[1], 'full_disk')
    assert len({report['message'] for report in reports}) == 1
    assert "stage 'write'" in reports[0]['message'] and 'No space left on device' in reports[0]['message']
    assert all(report['kept'] is not None for report in reports)


def test_a_disk_that_fills_up_beside_a_save_does_not_end_it(failed):
    """The room of the weights was reserved before the first byte."""
    assert {report['message'] for report in check(failed[1], 'full_disk_but_reserved')} == {'no error'}
