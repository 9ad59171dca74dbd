"""Calls to the file system that fail under a save, on rank 0 and on rank 1; and places that are out of the ordinary.

Not mocks of our functions: an LD_PRELOAD library fails the call itself, whoever makes it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.assert_intact import assert_whole, hidden
from tests.helpers.fault_launch import WORLD_SIZE, launch
from tests.helpers.fault_layer import SHORT, fault, no_exchange
from tests.helpers.scenarios import check

EIO, ENOSPC, EROFS = errno.EIO, errno.ENOSPC, errno.EROFS
#: Name to (call, how it ends, on which paths, failing rank, writer).
FAULTS = {
    'write_rank0_of_all': ('pwrite', ENOSPC, '.safetensors', 0, 'positional'),
    'write_rank1': ('pwrite', EIO, '.safetensors', 1, 'positional'),
    'open_rank1': ('open', errno.EMFILE, '.safetensors', 1, 'positional'),
    'fsync_rank1': ('fsync', EIO, '.safetensors', 1, 'positional'),
    'allocate': ('fallocate', ENOSPC, '.safetensors', 0, 'positional'),
    'sidecar': ('write', ENOSPC, 'config.json', 0, 'positional'),
    'manifest': ('write', ENOSPC, 'xhf_manifest.json', 0, 'positional'),
    'staging_folder': ('mkdir', EROFS, '.staging', 0, 'positional'),
    'rename': ('renameat2', EIO, '.staging', 0, 'positional'),
    'rename_aside': ('rename', EIO, '.previous', 0, 'positional'),
}
#: Beside a folder that is a link.
ODD_PLACE = "link/mein Lauf 大模型 it's [a] *glob* $HOME %s {x}"
TIMEOUT_SECS = 10.0


class Run:
    """Saves of one tiny model at ZeRO-3, numbered. Runs on: all ranks."""

    def __init__(self, parent: Path, writer: str = 'positional', timeout_secs: float = 600, max_keep: int = 1) -> None:
        from tests.helpers.kill_runs import tiny_model
        from xhf_hooks.collective import Collective
        from xhf_hooks.model import unwrap
        from xhf_hooks.options import SaveOptions
        from xhf_hooks.places.checkpoint_folder import CheckpointFolder
        from xhf_hooks.save import Saver

        self.collective = Collective(timeout_secs=timeout_secs)
        self.model = tiny_model(zero3=True)
        options = SaveOptions(bucket_size=20_000, max_shard_size=10_000)
        self.saver = Saver(unwrap(self.model), options, self.collective, writer=writer)
        self.saver.prepare()
        self.folder = CheckpointFolder(parent / 'hf_model', max_keep)
        with self.collective.stage('preflight'):
            if self.collective.rank == 0:
                self.folder.claim()

    def save(self, number: int, injected: AbstractContextManager[Any] = nullcontext()) -> str:  # noqa: B008
        """What came of it; empty when all is well."""
        from tests.helpers.kill_runs import fill
        from xhf_hooks.errors import XhfError
        from xhf_hooks.planning.types import Step

        fill(self.model, number)
        message = ''
        with injected:
            try:
                self.saver.save(self.folder, Step('iter', number, number))
            except XhfError as error:
                message = f'{type(error).__name__}: {error}'
        return message

    def found(self) -> dict[str, int]:
        """Visible saves, each whole; asked when all ranks are there."""
        self.collective.agree('test')
        found = {p.name: assert_whole(p) for p in self.folder.final.parent.iterdir() if not p.name.startswith('.')}
        self.collective.agree('test')
        return found

    def end(self) -> None:
        self.folder.release()
        self.collective.close()


def one_call(parent: Path, call: str, outcome: int, path: str, failing_rank: int, writer: str) -> dict[str, Any]:
    """Save, fail, save. Runs on: all ranks."""
    run = Run(parent, writer)
    first = run.save(1)
    with no_exchange() if path == '.previous' else nullcontext():
        here = fault(call, path, outcome) if run.collective.rank == failing_rank else nullcontext()
        message = run.save(2, here)
    kept, left = run.found(), hidden(parent)
    run.collective.agree('test')
    last = run.save(3)
    report = dict(first=first, message=message, kept=kept, left=left, last=last, found=run.found())
    run.end()
    return report


def short_writes(parent: Path) -> dict[str, Any]:
    """Every write takes half of what it is given. Runs on: all ranks."""
    run = Run(parent)
    message = run.save(1, fault('pwrite write', str(parent), SHORT, last=10**9))
    found = run.found()
    run.end()
    return dict(message=message, found=found)


def removed(parent: Path) -> dict[str, Any]:
    """Staging, then the newest save, then the whole folder is removed by somebody else. Runs on: all ranks."""
    from xhf_hooks.writers.output_file import OutputFile

    run, report = Run(parent), {}
    run.save(1)
    write = OutputFile.write

    def write_and_remove(self: OutputFile, *args: Any) -> None:
        write(self, *args)
        if run.collective.rank == 1:
            for staging in parent.glob('.hf_model.staging-*'):
                shutil.rmtree(staging, ignore_errors=True)

    report['staging'] = run.save(2, mock.patch.object(OutputFile, 'write', write_and_remove))
    report['kept'] = run.found()
    for number, gone in ((3, run.folder.final), (4, parent)):
        run.collective.agree('test')
        if run.collective.rank == 1:
            shutil.rmtree(gone)
        run.collective.agree('test')
        report[gone.name] = run.save(number)
        report[f'{gone.name} then'] = run.found()
    run.end()
    return report


def odd_place(parent: Path) -> dict[str, Any]:
    """A whole toy run of the hook, whose work_dir is an odd place. Runs on: all ranks."""
    import torch.distributed as dist

    from tests.helpers.toy_run import run_config, train

    work_dir = parent / ODD_PLACE
    if dist.get_rank() == 0:
        (parent / 'real').mkdir(parents=True)
        (parent / 'link').symlink_to('real')
    dist.barrier()
    hook = dict(interval=1, by_epoch=False, max_keep_ckpts=2)
    runner = train(run_config(work_dir, hook=hook, stage=3, max_iters=2))
    dist.barrier()
    log_dir = Path(runner.log_dir)
    found = {path.name: assert_whole(path) for path in log_dir.glob('hf_model*')}
    return dict(found=found, hidden=[name for name in hidden(log_dir) if 'hf_model' in name])


def permissions(parent: Path) -> dict[str, Any]:
    """A group's folder, and a umask for it. Runs on: all ranks."""
    import torch.distributed as dist
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    if dist.get_rank() == 0:
        parent.mkdir()
        os.chown(parent, -1, 12_345)
        parent.chmod(0o2775)
    dist.barrier()
    before = os.umask(0o002)
    try:
        run = Run(parent)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({'a': 0}, unk_token='a')))
        run.saver.tokenizer = tokenizer
        message = run.save(1)
        run.collective.agree('test')
        paths = [run.folder.final, *run.folder.final.rglob('*')]
        modes = {(path.name, oct(path.stat().st_mode & 0o7777), path.stat().st_gid, path.is_dir()) for path in paths}
        run.end()
    finally:
        os.umask(before)
    return dict(message=message, modes=modes)


def other_user(parent: Path) -> str:
    """Ranks of a user who may not write there, as root may not on a root-squashed share. Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks.collective import Collective
    from xhf_hooks.errors import XhfError
    from xhf_hooks.writers.choose import is_shared

    if dist.get_rank() == 0:
        parent.mkdir(mode=0o755)
    dist.barrier()
    messages = []
    with _as_nobody():
        try:
            Run(parent / 'run')
        except XhfError as error:
            messages.append(f'{type(error).__name__}: {error}')
        collective = Collective(timeout_secs=60)
        try:
            is_shared(parent / '.probe', collective)
        except XhfError as error:
            messages.append(f'{type(error).__name__}: {error}')
        collective.close()
    return '\n'.join(messages)


@contextmanager
def _as_nobody() -> Iterator[None]:
    os.setegid(65_534)
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def too_long(parent: Path) -> list[str]:
    """Names at the limit; one that just fits is saved to. Runs on: all ranks."""
    from tests.helpers.engines import save_folder
    from tests.helpers.kill_runs import tiny_model
    from xhf_hooks.errors import XhfError

    found = []
    for final in (parent / name for name in ('n' * 240, 'ü' * 120, 'n' * 231)):
        try:
            save_folder(tiny_model(zero3=True), final, max_shard_size=30_000)
            found.append('')
        except (XhfError, OSError) as error:
            found.append(f'{type(error).__name__}: {error}')
    return found


def late(parent: Path) -> list[str]:
    """Rank 1 comes later than the others wait; nothing is lost. Runs on: all ranks."""
    run = Run(parent, timeout_secs=TIMEOUT_SECS)
    messages = [run.save(1)]
    gave_up = parent / 'gave_up'
    while run.collective.rank == 1 and not gave_up.exists():
        time.sleep(0.05)
    messages.append(run.save(2))
    gave_up.touch()
    run.folder.release()
    messages.append(str(assert_whole(run.folder.final)))
    return messages


def scenarios(root: Path) -> dict[str, Callable[[], Any]]:
    """All of this module, for one launch."""
    found = {name: partial(one_call, root / name, *how) for name, how in FAULTS.items()}
    for one in (short_writes, removed, odd_place, permissions, other_user, too_long, late):
        found[one.__name__] = partial(one, root / one.__name__)
    return found


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('fault_layer')
    root.chmod(0o755)
    for folder in root.parents[:2]:  # pytest's own, which nobody else may enter
        folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    return launch(__name__, root, tmp_path_factory.mktemp('layer'))


@pytest.mark.parametrize('name', FAULTS)
def test_every_rank_gets_the_error_and_the_save_before_is_whole(results, name):
    _, outcome, _, failing_rank, _ = FAULTS[name]
    reports = check(results, name)
    assert len({report['message'] for report in reports}) == 1
    report = reports[0]
    assert report['message'].startswith('AgreedError') and f'rank {failing_rank}: OSError' in report['message']
    assert os.strerror(outcome) in report['message']
    assert (report['first'], report['last']) == ('', '')
    assert report['kept'] == {'hf_model': 1} and report['left'] == []
    assert report['found'] == {'hf_model': 3}


def test_short_writes_are_gone_on_with(results):
    assert check(results, 'short_writes') == [dict(message='', found={'hf_model': 1})] * WORLD_SIZE


def test_folders_removed_under_a_save(results):
    report, other = check(results, 'removed')
    assert report == other
    assert report['staging'].startswith('AgreedError') and report['kept'] == {'hf_model': 1}
    assert (report['hf_model'], report['hf_model then']) == ('', {'hf_model': 3})
    assert (report['removed'], report['removed then']) == ('', {'hf_model': 4})


def test_odd_places(results):
    for report in check(results, 'odd_place'):
        assert report == dict(found={'hf_model': 2, 'hf_model_iter_1': 1}, hidden=[])


def test_files_get_the_modes_and_the_group_that_the_user_wants(results):
    report = check(results, 'permissions')[0]
    assert report['message'] == ''
    files = {(name, mode, group) for name, mode, group, is_folder in report['modes'] if not is_folder}
    assert {name for name, _, _ in files} >= {'config.json', 'tokenizer.json', 'xhf_manifest.json'}
    assert {(mode, group) for _, mode, group in files} == {('0o664', 12_345)}, files
    assert {(mode, group) for _, mode, group, is_folder in report['modes'] if is_folder} == {('0o2775', 12_345)}


def test_a_user_who_may_not_write_is_told_before_training(results):
    messages = check(results, 'other_user')
    assert len(set(messages)) == 1
    claimed, shared = messages[0].splitlines()
    for message in (claimed, shared):
        assert message.startswith('AgreedError') and 'Permission denied' in message and 'set out_dir' in message


def test_a_name_that_is_too_long_is_told_before_training(results):
    for messages in check(results, 'too_long'):
        *refused, fits = messages
        assert fits == ''
        assert all('TargetError' in message and 'out_dir' in message for message in refused), refused


def test_a_rank_that_is_too_late(results):
    for messages in check(results, 'late'):
        first, second, found = messages
        assert first == '' and 'RankLostError' in second and found == '1'
