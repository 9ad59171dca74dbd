"""Runs that end badly on separate hosts, and competing runs: the ranks of tests/stress/test_network_fs.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers import network_saves as saves
from tests.helpers.kill_runs import tiny_model
from tests.helpers.moosefs import Host
from tests.helpers.network_saves import Way, judged, tell, wait_for


def save_until_death(host: Host, victim: int, parent: Path) -> str:
    """Save twice; during a third save a rank's host dies. Runs on: all ranks; returns a survivor's error.

    It dies before it writes: after a write, the server lets nobody else write there for two minutes.
    """
    import torch.distributed as dist

    from xhf_hooks.errors import XhfError
    from xhf_hooks.writers.output_file import OutputFile

    model, way = tiny_model(zero3=True), Way('positional', 'call')
    for number in (1, 2):
        saves.set_weights(model, number)
        saves.call_save(model, way, parent, number)
    write = OutputFile.write

    def write_or_die(self: OutputFile, *args: Any) -> None:
        if dist.get_rank() == victim:
            host.die()
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, *args)

    saves.set_weights(model, 3)
    with mock.patch.object(OutputFile, 'write', write_or_die):
        try:
            saves.call_save(model, way, parent, 3)
        except XhfError as error:
            return f'{type(error).__name__}: {error}'
    return 'no error'


def save_until_rename(before: int, parent: Path) -> str:
    """Save twice; a third save ends before a rename. Runs on: all ranks; returns a survivor's error."""
    import torch.distributed as dist

    from xhf_hooks.errors import XhfError

    model, way = tiny_model(zero3=True), Way('positional', 'run', 2)
    run = saves.run_of(model, way, parent)
    rename, calls = os.rename, []

    def rename_or_die(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) > before:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*args, **kwargs)

    for number in (1, 2, 3):
        saves.set_weights(model, number)
        if number < 3 or dist.get_rank() != 0:
            try:
                saves.save_in_run(run, number)
            except XhfError as error:
                return f'{type(error).__name__}: {error}'
            continue
        with mock.patch('os.rename', rename_or_die):
            saves.save_in_run(run, number)
    return 'no error'


def two_runs(hosts: Sequence[Host], parent: Path, signs: Path, judge: Host) -> Any:
    """Rank 0 is one run, rank 1 another, whose host has cached the lock of a run before both.

    Runs on: all ranks, without a process group.
    """
    import torch

    from xhf_hooks.errors import XhfError

    first = os.environ['RANK'] == '0'
    hosts[int(os.environ['RANK'])].enter()
    torch.set_num_threads(1)
    model, way = tiny_model(zero3=False).to(torch.bfloat16), Way('positional', 'run')
    if first:
        older = saves.run_of(model, way, parent)
        tell(signs / 'locked')
        wait_for(signs / 'looked')
        older.close()
        run = saves.run_of(model, way, parent)
        for number in (1, 2):
            saves.set_weights(model, number)
            saves.save_in_run(run, number)
        tell(signs / 'saved')
        wait_for(signs / 'refused')
        seen = [judged(judge.sees(parent), 2)]
        saves.set_weights(model, 3)
        saves.save_in_run(run, 3)
        seen.append(judged(judge.sees(parent), 3))
        run.close()
        tell(signs / 'ended')
        return seen
    wait_for(signs / 'locked')
    assert (parent / f'.{saves.NAME}.lock').exists()
    tell(signs / 'looked')
    saves.set_weights(model, 10)
    wait_for(signs / 'saved')
    try:
        saves.call_save(model, way, parent, 10)
        error = 'no error'
    except XhfError as refused:
        error = str(refused)
    tell(signs / 'refused')
    wait_for(signs / 'ended')
    saves.set_weights(model, 11)
    saves.call_save(model, way, parent, 11)
    return error, judged(judge.sees(parent), 11)
