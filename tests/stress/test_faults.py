"""Faults under a save, on one rank: all ranks report the same, nobody hangs, nothing is lost.

Calls to the file system fail in the call itself (an LD_PRELOAD library), whoever makes it.
"""

import errno
import itertools
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.helpers.checks.assert_intact import check_all, hidden
from tests.helpers.faults.fault_layer import fault, launch, no_exchange
from tests.helpers.faults.numbered import fill
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.ranks.scenarios import check, error_of
from tests.helpers.runs.engines import Saver, save_folder
from tests.helpers.runs.tiny_checkpoint import iteration
from tests.helpers.runs.zero_config import zero_config
from xhf_hooks.files.output_file import OutputFile
from xhf_hooks.files.writer import Writer
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.ranks.collective import Collective

pytestmark = pytest.mark.needs('root', 'compiler')

WORLD_SIZE = 3
LAST = WORLD_SIZE - 1
EIO, ENOSPC = errno.EIO, errno.ENOSPC
#: Name to (failing rank, writer, what is made to fail, how many calls of it are fine): in the middle of rounds, and
#: around DeepSpeed's gathers. test_every_function has the first call of all else.
STAGES = {
    'gather': (LAST, 'gather', 'xhf_hooks.sources.zero3.Zero3Source._gather_partitions', 0),
    'pack': (LAST, 'stream', 'xhf_hooks.sources.send._fill', 1),
    'room': (0, 'stream', 'xhf_hooks.sources.host_memory.BufferPool.take', 2),
    'room_of_all': (LAST, 'parallel', 'xhf_hooks.sources.host_memory.BufferPool.take', 2),
}
#: Name to (failing rank, call, how it ends, on which paths).
CALLS = {
    'write_of_rank0': (0, 'pwrite', ENOSPC, '.safetensors'),
    'write': (1, 'pwrite', EIO, '.safetensors'),
    'open': (1, 'open', errno.EMFILE, '.safetensors'),
    'fsync': (1, 'fsync', EIO, '.safetensors'),
    'allocate': (0, 'fallocate', ENOSPC, '.safetensors'),
    'manifest': (0, 'write', ENOSPC, 'xhf_manifest.json'),
    'staging_folder': (0, 'mkdir', errno.EROFS, '.staging'),
    'rename': (0, 'renameat2', EIO, '.staging'),
    'rename_aside': (0, 'rename', EIO, '.previous'),
}
#: In a file system's answers, by hand; test_network_fs has a real one.
STALE = [f'{kind}_{writer}' for kind in ('other_file', 'lost_writes') for writer in ('positional', 'parallel')]
FAULTS = [*STAGES, *CALLS, *STALE]
#: Where all of these are made: below a link, under a name with all kinds of characters.
ODD_PLACE = "link/mein Lauf 大模型 it's [a] *glob* $HOME %s {x}"
ROOM_FOR_MANIFEST = 16 * 1024  # bytes; the weights need ten times as many


class Run:
    """Saves of one tiny model at ZeRO-3, numbered. Runs on: all ranks."""

    def __init__(self, parent: Path, writer: str = 'positional', timeout_secs: float = 600, **options: Any) -> None:
        self.collective = Collective.connect(timeout_secs=timeout_secs)
        with deepspeed.zero.Init(config_dict_or_path=zero_config(3), dtype=torch.bfloat16):
            self.model = odd_llama(tied=True)
        options = {'bucket_size': 10_000, 'max_shard_size': 30_000, **options}
        self.saver = Saver(self.model, self.collective, writer=writer, **options)
        self.folder = CheckpointFolder(parent / 'hf_model', 1)
        with self.collective.stage('claim'):
            if self.collective.rank == 0:
                self.folder.lock_and_recover()

    def save(self, number: int, injected: AbstractContextManager[Any] = nullcontext()) -> str:  # noqa: B008
        """What came of it; empty when all is well."""
        fill(self.model, number)
        with injected:
            return error_of(self.saver.save, self.folder, iteration(number))

    def when_all_are_here(self, look: Callable[..., Any], *args: Any) -> Any:
        self.collective.raise_if_any_failed('test')
        found = look(*args)
        self.collective.raise_if_any_failed('test')
        return found

    def found(self) -> dict[str, int]:
        """Visible saves, each whole and of one save."""
        return self.when_all_are_here(check_all, self.folder.path.parent)

    def end(self) -> None:
        self.folder.unlock()
        self.collective.close()


def failing_after(n_fine: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which fails from then on."""
    calls = itertools.count()

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) < n_fine:
            return function(*args, **options)
        raise OSError(EIO, 'injected')

    return call


def another_file(opened: Callable[..., None]) -> Callable[..., None]:
    """As a stale cache of names does: the name stands for another file, of the same size."""

    def open_another(self: Any, plan: Any, folder: Path, made: Any, **options: Any) -> None:
        for name, identity in made.items():
            (folder / name).rename(folder / f'{name}.real')
            with (folder / name).open('wb') as file:
                file.truncate(identity.nbytes)
        opened(self, plan, folder, made, **options)

    return open_another


def save_fail_save(parent: Path, name: str) -> dict[str, Any]:
    """Save, save again while one rank fails, save a third time. Runs on: all ranks."""
    rank, writer, injected, verify = fault_of(name)
    run = Run(parent, writer, verify=verify)
    first = run.save(1)
    with no_exchange() if name == 'rename_aside' else nullcontext():
        message = run.save(2, injected if run.collective.rank == rank else nullcontext())
    report = dict(message=message, kept=run.found(), left=run.when_all_are_here(hidden, parent))
    report |= dict(saved=(first, run.save(3)), found=run.found())
    run.end()
    return report


def fault_of(name: str) -> tuple[int, str, AbstractContextManager[Any], str]:
    """The failing rank, the writer, the fault, and how the save is verified."""
    if name in STAGES:
        rank, writer, what, n_fine = STAGES[name]
        return rank, writer, mock.patch(what, failing_after(n_fine, resolve_name(what))), 'sizes'
    if name in CALLS:
        rank, call, outcome, path = CALLS[name]
        return rank, 'positional', fault(call, path, outcome), 'sizes'
    kind, writer = name.rsplit('_', 1)
    if kind == 'other_file':
        what = 'xhf_hooks.files.writer.Writer.open'
        return LAST, writer, mock.patch(what, another_file(resolve_name(what))), 'sizes'
    return LAST, writer, mock.patch('xhf_hooks.files.output_file.os.pwrite', lambda fd, data, _: len(data)), 'full'


def removed(parent: Path) -> dict[str, Any]:
    """Staging, then the newest save, then the whole folder is removed by somebody else. Runs on: all ranks."""
    run, report = Run(parent), {}
    run.save(1)
    write = OutputFile.write

    def write_and_remove(self: OutputFile, *args: Any) -> None:
        write(self, *args)
        if run.collective.rank == 1:
            for staging in parent.glob('.hf_model.staging-*'):
                shutil.rmtree(staging, ignore_errors=True)

    report['staging'] = run.save(2, mock.patch.object(OutputFile, 'write', write_and_remove)), run.found()
    for number, gone in ((3, run.folder.path), (4, parent)):
        run.when_all_are_here(shutil.rmtree if run.collective.rank == 1 else str, gone)
        report[gone.name] = run.save(number), run.found()
    run.end()
    return report


def full_disk(parent: Path, can_reserve: bool) -> dict[str, Any]:
    """The disk fills up while a save is written. Runs on: all ranks.

    Args:
        can_reserve: The file system can give a file its room before it is written; else fallocate says that it cannot.
    """
    run = Run(parent, 'stream')
    first = run.save(1)
    write, n_written = Writer.write, itertools.count()

    def fill_disk_and_write(self: Writer, chunk: Any) -> None:
        if next(n_written) == 1:
            _fill(parent.parent / 'filler', leave_nbytes=ROOM_FOR_MANIFEST)
        write(self, chunk)

    reserving = nullcontext() if can_reserve else mock.patch('xhf_hooks.system.linux_calls.fallocate.function', None)
    with reserving:
        message = run.save(2, mock.patch.object(Writer, 'write', fill_disk_and_write))
    run.when_all_are_here((parent.parent / 'filler').unlink if run.collective.rank == 0 else str)
    report = dict(first=first, message=message, found=run.found())
    run.end()
    return report


def _fill(filler: Path, leave_nbytes: int) -> None:
    with filler.open('wb', buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(file.tell() - leave_nbytes)


def permissions(parent: Path) -> set[tuple[str, str, int, bool]]:
    """A group's folder, and a umask for it; what each path gets. Runs on: all ranks."""
    if dist.get_rank() == 0:
        parent.mkdir()
        os.chown(parent, -1, 12_345)
        parent.chmod(0o2775)
    dist.barrier()
    before = os.umask(0o002)
    try:
        run = Run(parent)
        tokenizer = Tokenizer(models.WordLevel({'a': 0}, unk_token='a'))
        run.saver.context.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        assert run.save(1) == ''
        run.collective.raise_if_any_failed('test')
        paths = [run.folder.path, *run.folder.path.rglob('*')]
        run.end()
    finally:
        os.umask(before)
    return {(path.name, oct(path.stat().st_mode & 0o7777), path.stat().st_gid, path.is_dir()) for path in paths}


def long_names(root: Path) -> list[str]:
    """Errors of saves to folders of long names. Runs on: all ranks."""
    return [error_of(save_folder, odd_llama(), root / name) for name in ('n' * 240, 'ü' * 120, 'n' * 231)]


def few_open_files(parent: Path) -> list[str]:
    """A file for each tensor, with a low soft limit, then with a low hard one, for good. Runs on: all ranks."""
    run, messages = Run(parent), []
    assert run.save(1) == ''  # whatever is imported and connected first
    n_open = len(os.listdir('/proc/self/fd'))

    def save_many_files(number: int) -> None:
        run.saver = Saver(run.model, run.collective, writer='positional', max_shard_size=100)
        run.saver.save(run.folder, iteration(number))

    fill(run.model, 2)
    for number, hard in enumerate([4096, n_open + 8], start=2):
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + 8, hard))
        messages.append(error_of(save_many_files, number))
    assert run.found() == {'hf_model': 2}
    return messages


def late(parent: Path) -> list[Any]:
    """The last rank comes later than the others wait; nothing is lost. Runs on: all ranks."""
    run = Run(parent, timeout_secs=10)
    messages: list[Any] = [run.save(1)]
    gave_up = parent / '.gave_up'
    while run.collective.rank == LAST and not gave_up.exists():
        time.sleep(0.05)
    messages.append(run.save(2))
    gave_up.touch()
    run.folder.unlock()
    return [*messages, check_all(parent)]


def other_model(parent: Path) -> str:
    """Another one on one rank. Runs on: all ranks."""
    return error_of(save_folder, odd_llama(tied=dist.get_rank() == 1), parent / 'hf_model')


def scenarios(root: Path) -> dict[str, Callable[[], Any]]:
    """All of this module, for one launch."""
    odd = root / ODD_PLACE
    found: dict[str, Callable[[], Any]] = {name: partial(save_fail_save, odd / name, name) for name in FAULTS}
    for one in (removed, permissions, other_model, late, long_names):
        found[one.__name__] = partial(one, root / one.__name__)
    for can_reserve in (False, True):
        found[f'full_disk_{can_reserve}'] = partial(full_disk, root / 'disk' / str(can_reserve), can_reserve)
    found['few_open_files'] = partial(few_open_files, root / 'few_open_files')  # last, since the limit stays
    return found


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('faults')
    (root / 'disk').mkdir()
    (root / 'real').mkdir()
    (root / 'link').symlink_to('real')
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', root / 'disk'], check=True)
    try:
        yield launch(__name__, root, WORLD_SIZE)
    finally:
        subprocess.run(['umount', root / 'disk'], check=True)


def of_all_ranks(results: Any, name: str) -> Any:
    """What each rank found, which must be the same."""
    first, *others = check(results, name)
    assert all(other == first for other in others), (first, others)
    return first


@pytest.mark.parametrize('name', FAULTS)
def test_every_rank_gets_the_error_and_nothing_is_lost(results, name):
    report = of_all_ranks(results, name)
    assert report['message'].startswith('AgreedError') and all(words in report['message'] for words in said(name))
    assert (report['kept'], report['left']) == ({'hf_model': 1}, [])
    assert (report['saved'], report['found']) == (('', ''), {'hf_model': 3})


def said(name: str) -> tuple[str, ...]:
    if name in STAGES:
        return f'rank {STAGES[name][0]}: OSError', 'injected'
    if name in CALLS:
        return f'rank {CALLS[name][0]}: OSError', os.strerror(CALLS[name][2])
    if name.startswith('other_file'):
        return "stage 'write' failed", 'expected the file that rank 0 created', "writer='stream'"
    return "stage 'commit' failed", 'rank 0:'


def test_folders_removed_under_a_save(results):
    report = of_all_ranks(results, 'removed')
    message, found = report.pop('staging')
    assert message.startswith('AgreedError') and found == {'hf_model': 1}
    assert report == {'hf_model': ('', {'hf_model': 3}), 'removed': ('', {'hf_model': 4})}


def test_a_full_disk_keeps_the_previous_save(results):
    report = of_all_ranks(results, 'full_disk_False')
    assert "stage 'write'" in report['message'] and 'No space left on device' in report['message']
    assert re.search(r"/\.hf_model\.staging-\w+/model-.*\.safetensors'", report['message'])
    assert report['found'] == {'hf_model': 1}


def test_a_disk_that_fills_up_beside_a_save_does_not_end_it(results):
    """The room of the weights was reserved before the first byte."""
    assert of_all_ranks(results, 'full_disk_True') == {'first': '', 'message': '', 'found': {'hf_model': 2}}


def test_files_get_the_modes_and_the_group_that_the_user_wants(results):
    found = of_all_ranks(results, 'permissions')
    assert {name for name, *_ in found} >= {'config.json', 'tokenizer.json', 'xhf_manifest.json', 'hf_model'}
    wanted = {True: ('0o2775', 12_345), False: ('0o664', 12_345)}
    assert [one for one in found if one[1:3] != wanted[one[3]]] == []


def test_a_name_that_is_too_long_is_told_before_training(results):
    *long, fits = of_all_ranks(results, 'long_names')
    assert fits == '' and all('TargetError' in message and 'out_dir' in message for message in long)


def test_the_soft_limit_of_open_files_is_raised_and_the_hard_one_named(results):
    soft, hard = of_all_ranks(results, 'few_open_files')
    assert soft == '' and 'LimitError' in hard and 'files of weights' in hard and 'ulimit -Hn' in hard


def test_a_rank_that_is_too_late(results):
    for first, second, found in check(results, 'late'):
        assert first == '' and 'RankLostError' in second and found == {'hf_model': 1}


def test_different_models_are_named_on_both_sides(results):
    message = of_all_ranks(results, 'other_model')
    assert message.startswith('RanksDifferError') and 'differs between ranks 0 and [1]' in message
