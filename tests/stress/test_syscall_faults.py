"""A fault, or the end of the process, at file-system calls of a save: nothing is lost, nothing is partial.

The calls are those that reach the kernel's door (an LD_PRELOAD library, tests/helpers/faults/fault_layer.c), whoever
makes them: this package, Python, transformers or the safetensors library. Of each kind of fault, every fourth call gets
it.
"""

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.helpers.checks.assert_intact import check_all, hidden, weight_of
from tests.helpers.faults.fault_layer import CHANGES, EVERY, KILL, SHORT, fault, launch, no_exchange
from tests.helpers.ranks.scenarios import check, error_of
from tests.helpers.runs.engines import Saver
from tests.helpers.runs.tiny_checkpoint import iteration
from xhf_hooks.errors import XhfError
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.ranks.collective import Collective

pytestmark = pytest.mark.needs('root', 'compiler')

NAME = 'hf_model'
LEAST_CALLS = 50  # of a run of one save; fewer would mean that the layer sees too little
STRIDE = 4


class SmallRun:
    """Runs of one save each, in one process; every weight is the number of the save."""

    def __init__(self, parent: Path, max_keep: int = 1) -> None:
        parent.mkdir()
        self.model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8))
        self.alone = Collective.connect()
        self.make_saver()
        self.parent, self.max_keep = parent, max_keep
        self.number = 0
        for _ in range(max_keep):
            self.start_save_stop()

    def make_saver(self) -> None:
        """In each process: a forked child has none of its threads."""
        self.saver = Saver(self.model, self.alone, max_shard_size=2500, writer='positional')

    def folder(self) -> CheckpointFolder:
        return CheckpointFolder(self.parent / NAME, self.max_keep)

    def save(self, folder: CheckpointFolder) -> None:
        self.number += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(weight_of(self.number))
        self.saver.save(folder, iteration(self.number))

    def start_save_stop(self) -> None:
        folder = self.folder()
        with self.alone.stage('preflight'):  # like the hook
            folder.lock_and_recover()
        try:
            self.save(folder)
        finally:
            folder.unlock()

    def dies_at(self, nth: int) -> bool:
        """Run a child that is killed at its ``nth`` call; returns whether it got that far."""
        child = os.fork()
        if child == 0:
            self.make_saver()
            with fault(CHANGES, self.parent, KILL, first=nth):
                self.start_save_stop()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        return os.WIFSIGNALED(status)


def fail_at_calls(parent: Path, outcome: int, max_keep: int = 1) -> dict[str, Any]:
    """Let a call of a save fail: the old or the new save is complete, and the next save succeeds."""
    run, errors, unharmed = SmallRun(parent, max_keep), [], []
    with fault(CHANGES, parent, errno.EIO, first=0, last=0) as counted:
        run.start_save_stop()
    for nth in range(1, counted.n_calls + 1, STRIDE):
        before = run.number
        with fault(CHANGES, parent, outcome, first=nth):
            error = error_of(run.start_save_stop)
            (errors if error else unharmed).append(error or nth)
        assert check_all(parent)[NAME] in ({run.number} if nth in unharmed else {before, run.number}), nth
        run.start_save_stop()
        assert (check_all(parent)[NAME], hidden(parent)) == (run.number, []), nth
    return {'calls': counted.n_calls, 'errors': errors, 'unharmed': unharmed}


def die_at_calls(parent: Path, max_keep: int = 1, *, can_exchange: bool = True) -> dict[str, int]:
    """SIGKILL at a call: visible saves are complete at once, and the next run cleans up and saves.

    Where two folders cannot be exchanged, the final name may be missing until then.
    """
    run, committed, missing, nth = SmallRun(parent, max_keep), 0, 0, 1
    with contextlib.nullcontext() if can_exchange else no_exchange():
        while run.dies_at(nth):
            before = check_all(parent)
            assert before.get(NAME, run.number) in (run.number, run.number + 1), nth
            missing += NAME not in before
            committed += before.get(NAME) == run.number + 1
            run.number += 1
            folder = run.folder()
            folder.lock_and_recover()
            found = check_all(parent)
            assert hidden(parent) == [] and before.get(NAME, run.number - 1) <= found[NAME] <= run.number, nth
            run.save(folder)
            folder.unlock()
            found = check_all(parent)
            assert found[NAME] == run.number and len(found) <= max_keep, nth
            nth += STRIDE
    return {'calls': nth, 'committed': committed, 'missing': missing}


def undeletable(parent: Path) -> tuple[list[str], list[str], dict[str, int]]:
    """Old files cannot be deleted, as if readers held them open on NFS: saves still work."""
    run = SmallRun(parent)
    with fault('unlink rmdir', f'{parent}/.{NAME}', errno.EBUSY, last=EVERY):
        folder = run.folder()
        with contextlib.suppress(XhfError):
            folder.lock_and_recover()
        for _ in range(3):
            run.save(folder)
            assert check_all(parent) == {NAME: run.number}
    left = hidden(parent)
    folder.unlock()
    run.start_save_stop()
    return left, hidden(parent), check_all(parent)


def scenarios(root: Path) -> dict[str, Callable[[], Any]]:
    return {
        'eio': partial(fail_at_calls, root / 'eio', errno.EIO),
        'enospc': partial(fail_at_calls, root / 'enospc', errno.ENOSPC, 2),
        'short': partial(fail_at_calls, root / 'short', SHORT),
        'kill': partial(die_at_calls, root / 'kill'),
        'kill_keeping_two': partial(die_at_calls, root / 'kill_keeping_two', 2),
        'kill_without_exchange': partial(die_at_calls, root / 'kill_without_exchange', can_exchange=False),
        'undeletable': partial(undeletable, root / 'undeletable'),
    }


@pytest.fixture(scope='module')
def results(tmp_path_factory) -> Iterator[Any]:
    """On a file system in memory, where fsync costs nothing."""
    root = tmp_path_factory.mktemp('calls')
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64m', 'tmpfs', root], check=True)
    try:
        yield launch(__name__, root, 1)
    finally:
        subprocess.run(['umount', root], check=True)


@pytest.mark.parametrize(('name', 'text'), [('eio', 'Input/output error'), ('enospc', 'No space left')])
def test_a_call_that_fails_is_our_error(results, name, text):
    """And a whole folder has the name, and the next run saves."""
    (found,) = check(results, name)
    assert found['calls'] >= LEAST_CALLS and all(text in message for message in found['errors']), found
    assert len(found['errors']) >= len(found['unharmed']), 'only what comes after the commit may fail unnoticed'


def test_a_write_may_take_less_than_it_was_given(results):
    (found,) = check(results, 'short')
    assert found['errors'] == [] and found['calls'] >= LEAST_CALLS


@pytest.mark.parametrize('name', ['kill', 'kill_keeping_two', 'kill_without_exchange'])
def test_killed_at_a_call(results, name):
    """Before the commit the old save is there, after it the new one: both happened."""
    (found,) = check(results, name)
    assert found['calls'] >= LEAST_CALLS and 0 < found['committed'] * STRIDE < found['calls']
    assert found['missing'] <= (name == 'kill_without_exchange')


def test_what_cannot_be_deleted_is_in_nobodys_way(results):
    """A reader holds files of the old save open on NFS: saves go on, and the next run clears up."""
    ((left, then, found),) = check(results, 'undeletable')
    assert any('discarded' in name for name in left) and (then, found) == ([], {NAME: 5})
