"""Repeats a save in one process, with a fault at each of its file-system calls in turn.

tests/stress/test_syscall_faults.py runs it under LD_PRELOAD: python -m tests.helpers.syscall_faults FOLDER
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.helpers.assert_intact import check_all, hidden, weight_of
from tests.helpers.fault_layer import CHANGES, EVERY, KILL, SHORT, fault, no_exchange
from xhf_hooks.collective import Collective
from xhf_hooks.errors import XhfError
from xhf_hooks.model import unwrap
from xhf_hooks.options import SaveOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import Step
from xhf_hooks.save import Saver

_NAME = 'hf_model'


def small_model() -> torch.nn.Module:
    """A model of seven tensors, saved in several files."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8))


class SmallRun:
    """Saves in which every weight is the number of the save."""

    def __init__(self, parent: Path, max_keep: int = 1) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self.model = small_model()
        self.alone = Collective()
        self.saver = Saver(unwrap(self.model), SaveOptions(max_shard_size=2500), self.alone, writer='positional')
        self.saver.prepare()
        self.parent = parent
        self.max_keep = max_keep
        self.number = 0

    def folder(self) -> CheckpointFolder:
        return CheckpointFolder(self.parent / _NAME, self.max_keep)

    def save(self, folder: CheckpointFolder) -> None:
        self.number += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(weight_of(self.number))
        self.saver.save(folder, Step('iter', self.number, self.number))

    def start_save_stop(self) -> None:
        """A whole run, of one save."""
        folder = self.folder()
        with self.alone.stage('preflight'):  # like the hook
            folder.claim()
        try:
            self.save(folder)
        finally:
            folder.release()

    def n_calls(self) -> int:
        """Number of calls of a run with one save."""
        with fault(CHANGES, self.parent, errno.EIO, first=0, last=0) as seen:
            self.start_save_stop()
        return seen.n_calls


def fail_each_call(parent: Path, outcome: int, max_keep: int) -> dict[str, Any]:
    """Let each call of a save fail once: the old or the new save is complete, and the next save succeeds."""
    run = SmallRun(parent, max_keep)
    for _ in range(max_keep):
        run.start_save_stop()
    n_calls = run.n_calls()
    errors, unharmed = {}, []
    for nth in range(1, n_calls + 1):
        before = run.number
        with fault(CHANGES, parent, outcome, first=nth) as seen:
            try:
                run.start_save_stop()
                unharmed.append(nth)
            except XhfError as error:
                errors[nth] = str(error)
        if seen.n_calls >= nth:
            found = check_all(parent)
            assert found[_NAME] in ({run.number} if nth in unharmed else {before, run.number}), (nth, found)
        run.start_save_stop()
        assert check_all(parent)[_NAME] == run.number, nth
        assert hidden(parent) == [], (nth, hidden(parent))
    return {'calls': n_calls, 'errors': errors, 'unharmed': unharmed}


def die_at_each_call(parent: Path, max_keep: int) -> dict[str, Any]:
    """SIGKILL at each call: visible saves are complete at once, and the next run cleans up and saves."""
    run = SmallRun(parent, max_keep)
    for _ in range(max_keep):
        run.start_save_stop()
    n_calls = run.n_calls()
    committed = nth = 0
    while _die_at(run, nth := nth + 1):
        found = check_all(parent)
        assert found[_NAME] in (run.number, run.number + 1), (nth, found)
        committed += found[_NAME] == run.number + 1
        run.number += 1
        _next_run_clears_up(run, nth)
    return {'calls': n_calls, 'deaths': nth - 1, 'committed': committed}


def die_without_exchange(parent: Path) -> dict[str, Any]:
    """The same where two folders cannot be swapped: the final name may be missing until the next run starts."""
    run = SmallRun(parent)
    nth = missing = 0
    with no_exchange():
        run.start_save_stop()
        while _die_at(run, nth := nth + 1):
            found = check_all(parent)
            missing += _NAME not in found
            assert found.get(_NAME, run.number) in (run.number, run.number + 1), (nth, found)
            run.number += 1
            _next_run_clears_up(run, nth)
    return {'deaths': nth - 1, 'missing_until_next_run': missing}


def _die_at(run: SmallRun, nth: int) -> bool:
    """Run a child that is killed at its ``nth`` call; returns whether it got that far."""
    child = os.fork()
    if child == 0:
        with fault(CHANGES, run.parent, KILL, first=nth):
            run.start_save_stop()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _next_run_clears_up(run: SmallRun, nth: int) -> None:
    before = check_all(run.parent)
    folder = run.folder()
    folder.claim()
    after = check_all(run.parent)
    assert hidden(run.parent) == [], (nth, hidden(run.parent))
    assert after[_NAME] in (run.number - 1, run.number) and after[_NAME] >= before.get(_NAME, 0), (nth, before, after)
    run.save(folder)
    folder.release()
    found = check_all(run.parent)
    assert found[_NAME] == run.number and len(found) <= run.max_keep, (nth, found)


def undeletable(parent: Path) -> dict[str, Any]:
    """Old files cannot be deleted, as if readers held them open on NFS: saves still work."""
    run = SmallRun(parent)
    run.start_save_stop()
    with fault('unlink rmdir', f'{parent}/.{_NAME}', errno.EBUSY, last=EVERY):
        folder = run.folder()
        with contextlib.suppress(XhfError):
            folder.claim()
        for _ in range(3):
            run.save(folder)
            assert check_all(parent) == {_NAME: run.number}
    left = hidden(parent)
    folder.release()
    run.start_save_stop()
    return {'left': left, 'then': hidden(parent), 'newest': check_all(parent)[_NAME], 'number': run.number}


SCENARIOS: dict[str, Callable[[Path], Any]] = {
    'eio': lambda parent: fail_each_call(parent, errno.EIO, 1),
    'enospc_keeping_two': lambda parent: fail_each_call(parent, errno.ENOSPC, 2),
    'short': lambda parent: fail_each_call(parent, SHORT, 1),
    'kill': lambda parent: die_at_each_call(parent, 1),
    'kill_keeping_two': lambda parent: die_at_each_call(parent, 2),
    'kill_without_exchange': die_without_exchange,
    'undeletable': undeletable,
}


def main() -> None:
    import time
    import traceback

    root = Path(sys.argv[1])
    for name in sys.argv[2:] or SCENARIOS:
        started = time.monotonic()
        try:
            report = {'value': SCENARIOS[name](root / name)}
        except Exception:
            report = {'error': traceback.format_exc()}
        report['secs'] = round(time.monotonic() - started, 1)
        (root / f'{name}.json').write_text(json.dumps(report))


if __name__ == '__main__':
    main()
