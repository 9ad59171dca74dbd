"""Connections between ranks that break once, ranks that do not come, and a store that outlives a restart."""

import contextlib
import logging
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  registers the backend 'fake'

from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.ranks.launch import run_ranks
from tests.helpers.runs.engines import open_run
from tests.helpers.runs.tiny_checkpoint import iteration
from xhf_hooks import save_hf
from xhf_hooks.errors import RankLostError
from xhf_hooks.ranks import rendezvous
from xhf_hooks.ranks.collective import Collective


class Lines(logging.Handler):
    """What is logged, by level and text."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []
        logging.root.addHandler(self)
        logging.root.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelname, record.getMessage()))

    def count(self, level: str, text: str) -> int:
        return sum(level == found and text in line for found, line in self.seen)


def sockets() -> dict[int, str]:
    found = {}
    for name in os.listdir('/proc/self/fd'):
        with contextlib.suppress(OSError):
            if (target := os.readlink(f'/proc/self/fd/{name}')).startswith('socket'):
                found[int(name)] = target
    return found


def break_connections(ours: dict[int, str]) -> None:
    """As a firewall does, which closes idle connections. Runs on: one rank."""
    for fd, target in ours.items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
            assert os.readlink(f'/proc/self/fd/{fd}') == target
            found.getpeername()  # else it only listens
            found.shutdown(socket.SHUT_RDWR)


def save_over_broken_connections(folder: Path, async_save: bool) -> dict[str, Any]:
    """Runs on: all ranks."""
    lines, before = Lines(), sockets()
    options: dict[str, Any] = dict(async_save=async_save, save_on_signal='SIGUSR2', on_error='continue')
    saves = open_run(odd_llama(), folder, collective=Collective.connect(), trainer=lines, **options)
    ours = {fd: target for fd, target in sockets().items() if before.get(fd) != target}
    saves.save_if_requested(iteration(1))
    saves.save(iteration(1))
    saves.wait_for_background_save()
    dist.barrier()
    if dist.get_rank() == 1:
        break_connections(ours)
    dist.barrier()
    for number in (2, 3, 4):
        saves.save_if_requested(iteration(number))  # training goes on
    saves.save(iteration(5))
    saves.wait_for_background_save()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    for number in (6, 7):
        saves.save_if_requested(iteration(number))
    saves.wait_for_background_save()
    saved = [number for number in range(9) if lines.count('INFO', f'saved iter_{number} to')]
    saves.close()
    return {
        'saved': saved,
        'again': lines.count('WARNING', 'a connection between ranks had broken; they are connected again') > 0,
        'deaf': lines.count('ERROR', 'save_on_signal and interval_minutes have no effect until a save'),
        'errors': lines.count('ERROR', ''),
    }


@pytest.mark.parametrize('async_save', [False, True])
def test_a_broken_connection_is_made_again_at_the_next_save_and_training_goes_on(async_save, tmp_path):
    for found in run_ranks(save_over_broken_connections, 2, tmp_path / 'hf_model', async_save, init='torch'):
        assert found == {'saved': [1, 5, 7], 'again': True, 'deaf': 1, 'errors': 1}


def lose_in_the_middle(folder: Path) -> list[str]:
    """The connection of one rank breaks, which only that rank has noticed. Runs on: all ranks."""
    ranks = Collective.shared()
    assert not ranks.ensure_connected()
    dist.barrier()
    if dist.get_rank() == 1:
        ranks.abandon()
    path = save_hf(odd_llama(), folder).path
    return [path.name, *Collective.shared().from_all_ranks('exchange', lambda: 'here')]


def test_a_break_that_one_rank_has_noticed_is_mended_on_all(tmp_path):
    assert run_ranks(lose_in_the_middle, 3, tmp_path / 'hf_model', init='torch') == [['hf_model'] + ['here'] * 3] * 3


def save_on_rank_0_alone(folder: Path) -> list[str]:
    """Runs on: all ranks."""
    lines, save = Lines(), partial(save_hf, odd_llama(), folder)
    save()
    with mock.patch.multiple(rendezvous, WARN_AFTER_SECS=0.5, _REGISTER_SECS=0.5):
        if dist.get_rank() == 0:
            with mock.patch.object(Collective, '_warn_of_missing_ranks', told_then(Collective._warn_of_missing_ranks)):
                save()
        else:
            dist.distributed_c10d._get_default_store().wait(['told'])
            save()
    return [line for level, line in lines.seen if level == 'WARNING' and 'waits for' in line]


def told_then(tell: Any) -> Any:
    def told(self: Collective) -> None:
        tell(self)
        dist.distributed_c10d._get_default_store().set('told', '')

    return told


def test_ranks_that_do_not_make_a_later_save_are_named(tmp_path):
    first, *others = run_ranks(save_on_rank_0_alone, 3, tmp_path / 'hf_model', init='torch')
    (line,) = first
    assert line.startswith('rank 0 waits for ranks 1, 2, which did not reach this save so far'), line
    assert others == [[], []]


def restart() -> list[list[int]]:
    """Three attempts with one store, as torchrun's outlives a restart; in the second one, rank 1 dies before its save.

    Training's own group does not communicate here: NCCL's finds its ranks, gloo's would not. Runs on: all ranks.
    """
    rank, found = int(os.environ['RANK']), []
    store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), 2, rank == 0)
    for attempt in range(3):
        dist.init_process_group('fake', store=dist.PrefixStore('default_pg', store), rank=rank, world_size=2)
        if attempt != 1:
            found.append(Collective.connect(timeout_secs=60.0).from_all_ranks('exchange', lambda: rank))
        elif rank == 0:
            with pytest.raises(RankLostError, match='rank 0: ranks 1 have not reached this save within 1 s'):
                Collective.connect(timeout_secs=1.0)
        dist.destroy_process_group()
        store.add(f'ended {attempt}', 1)
        while store.add(f'ended {attempt}', 0) < 2:
            time.sleep(0.02)
    store.add('left', 1)
    while rank == 0 and store.add('left', 0) < 2:  # the store is rank 0's
        time.sleep(0.02)
    return found


def test_a_store_that_outlives_a_restart(tmp_path):
    assert run_ranks(restart, 2, init=None) == [[[0, 1]] * 2] * 2
