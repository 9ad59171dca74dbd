"""Ranks that die before, during or after a save: the others get an error at once or within a bound, nothing is lost.

And a disk so slow that a save outlasts the time-out of the process group: the ranks wait elsewhere.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch.distributed as dist

from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.models.zoo.llamas import llama, odd_llama
from tests.helpers.ranks.launch import run_ranks
from tests.helpers.ranks.scenarios import error_of
from tests.helpers.runs.engines import save_folder, zero_engine
from xhf_hooks import save_hf, sources
from xhf_hooks.files.output_file import OutputFile
from xhf_hooks.ranks import collective, rendezvous
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.ends.save_requests import SaveRequests
from xhf_hooks.runs.telemetry import RunLog

#: Far less than two hours, and far more than what a busy machine needs.
BOUND_SECS = 900
GROUP_TIMEOUT_SECS = 15  # on a busy machine ranks are seconds apart without a disk


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def what_came(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[str, float]:
    """The error, and after how many seconds."""
    started = time.monotonic()
    return error_of(function, *args, **options), time.monotonic() - started


def assert_missed(found: list[Any], dead_rank: int, said: str = 'lost contact with the other ranks') -> None:
    for rank in set(range(len(found))) - {dead_rank}:
        message, seconds = found[rank]
        assert f'RankLostError: rank {rank} {said}' in message, message
        assert seconds < BOUND_SECS


def lose_while_saving(dead_rank: int, writer: str, owner: str, method: str, root: Path) -> tuple[str, float]:
    """A rank dies in its third call of a method; in the background if that is one of Collective. Runs on: all ranks."""
    model = odd_llama(bf16=True)
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'expected')
    engine = zero_engine(model, stage=3)
    save_folder(engine.module, root / 'hf_model')
    dies_in = {'Collective': collective.Collective, 'Zero3Source': sources.Zero3Source}[owner]
    calls, real = [], getattr(dies_in, method)

    def third_is_the_last(*args: Any) -> Any:
        calls.append(1)
        if dist.get_rank() == dead_rank and len(calls) == 3:
            die()
        return real(*args)

    options = dict(bucket_size=4000, writer=writer, in_background=owner == 'Collective')
    with mock.patch.object(dies_in, method, third_is_the_last):
        return what_came(save_folder, engine.module, root / 'hf_model', **options)


@pytest.mark.parametrize(
    ('n_ranks', 'dead_rank', 'writer', 'dies_in'),
    [
        (2, 1, 'gather', ('Zero3Source', '_gather_partitions')),
        (3, 1, 'stream', ('Collective', 'post')),
        (3, 0, 'stream', ('Collective', 'post')),
    ],
)
def test_a_rank_that_dies_during_a_save_is_missed_and_nothing_is_lost(tmp_path, n_ranks, dead_rank, writer, dies_in):
    found = run_ranks(lose_while_saving, n_ranks, dead_rank, writer, *dies_in, tmp_path, expected_deaths={dead_rank})
    assert_missed(found, dead_rank)
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'hf_model')
    if dead_rank and dies_in[0] == 'Zero3Source':  # rank 0 clears what it staged
        assert not list(tmp_path.glob('.hf_model.staging*'))


def lose_between_saves(dead_rank: int, first: bool, out_dir: Path) -> tuple[str, float]:
    """A rank dies between two saves, or before the first, when nobody knows it. Runs on: all ranks."""
    model = llama()
    if not first:
        save_hf(model, out_dir)
    dist.barrier()
    if dist.get_rank() == dead_rank:
        die()
    with mock.patch.object(Collective, 'connect', partial(Collective.connect, timeout_secs=5.0)):
        return what_came(save_hf, model, out_dir)


@pytest.mark.parametrize(('dead_rank', 'first'), [(1, False), (0, True)])
def test_a_rank_that_died_between_two_saves_or_before_the_first_is_missed(tmp_path, dead_rank, first):
    found = run_ranks(
        lose_between_saves, 2, dead_rank, first, tmp_path / 'hf_model', expected_deaths={dead_rank}, init='torch'
    )
    assert_missed(found, dead_rank, 'lost contact with the other ranks')


def wait_for_some(n_come: int) -> tuple[str, list[str]]:
    """Only the first ranks save: the error of each, and its log. Runs on: all ranks."""
    if dist.get_rank() >= n_come:
        time.sleep(4)
        return '', []
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger('xhf_hooks').addHandler(handler)
    with mock.patch.object(rendezvous, 'WARN_AFTER_SECS', 0.5):
        message = error_of(Collective.connect, 3.0)
    return message, lines


def test_ranks_that_wait_for_others_to_save_tell_for_which():
    *waited, absent = run_ranks(wait_for_some, 3, 2, init='torch')
    assert absent == ('', [])
    assert 'rank 0: ranks 2 have not reached this save within 3 s' in waited[0][0], waited
    assert 'rank 1: other ranks have not reached this save within 3 s' in waited[1][0], waited
    remedy = 'which did not reach this save so far: all ranks must make each save, even those that write nothing'
    assert [lines for _, lines in waited] == [[f'rank 0 waits for ranks 2, {remedy}'], []]


def save_late(out_dir: Path) -> str:
    """Rank 0 evaluates for longer than connecting may take, before the first save. Runs on: all ranks."""
    if dist.get_rank() == 0:
        time.sleep(6)
    with mock.patch.object(collective, 'CONNECT_TIMEOUT_SECS', 3.0):
        return error_of(save_hf, llama(), out_dir)


def test_a_rank_that_comes_late_to_the_first_save_is_waited_for(tmp_path):
    assert run_ranks(save_late, 2, tmp_path / 'hf_model', init='torch') == [''] * 2
    assert folder_tensors(tmp_path / 'hf_model')


def lose_one_of_many(dead_rank: int, ring_ranks: int) -> tuple[str, float]:
    """One dies between two agreements. Runs on: all ranks."""
    collective._RING_RANKS = ring_ranks  # of this process, which ends
    ranks = Collective.connect()
    ranks.raise_if_any_failed('before')
    if dist.get_rank() == dead_rank:
        die()
    first, seconds = what_came(lambda: [ranks.raise_if_any_failed('after') for _ in range(3)])
    return f'{first} / {error_of(ranks.raise_if_any_failed, "again")}', seconds


@pytest.mark.parametrize('ring_ranks', [1, 8])
def test_all_others_learn_of_a_death_at_once_not_its_neighbours_alone(ring_ranks):
    """With as few steps as many ranks need, and in a ring, as few ranks agree."""
    found = run_ranks(lose_one_of_many, 7, 5, ring_ranks, expected_deaths={5}, init='torch')
    assert_missed(found, 5)
    assert all('the connection broke earlier' in message for message, _ in filter(None, found))


def ask_without(dead_rank: int, has_left: Path | None = None) -> tuple[str, float]:
    """Lose a rank between two iterations. Runs on: all ranks.

    Args:
        has_left: The rank does not die, but does not answer either until the others have left.
    """
    requests = SaveRequests.start(RunLog(logging.getLogger('test'), 'test'), [signal.SIGUSR2])
    assert [requests.is_due() for _ in range(3)] == [False] * 3
    dist.barrier()
    if dist.get_rank() == dead_rank:
        deadline = time.monotonic() + BOUND_SECS
        while has_left is not None and not has_left.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        die()
    started = time.monotonic()
    message, _ = what_came(lambda: [requests.is_due() for _ in range(1 if has_left else 3)])
    requests.close()
    if has_left is not None:
        has_left.touch()
    return message, time.monotonic() - started


def test_a_rank_that_died_is_missed_at_the_end_of_the_next_iteration():
    assert_missed(run_ranks(ask_without, 3, 1, expected_deaths={1}, init='torch'), 1)


def test_a_rank_that_fails_does_not_wait_for_one_that_hangs(tmp_path):
    """Its question is still in flight, and torch would wait for that."""
    message, seconds = run_ranks(ask_without, 2, 1, tmp_path / 'has_left', expected_deaths={1}, init='torch')[0]
    assert message == '' and seconds < BOUND_SECS


def save_slowly(root: Path) -> float:
    """Runs on: all ranks; returns the seconds that the save took."""
    deepspeed.init_distributed(dist_backend='gloo', timeout=timedelta(seconds=GROUP_TIMEOUT_SECS))
    model = odd_llama(bf16=True)
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'expected')
    engine = zero_engine(model, stage=3)
    write, calls = OutputFile.write, []

    def write_slowly(self: OutputFile, *args: object) -> None:
        calls.append(args)
        if len(calls) == 5:  # in the middle: the others are sending, or wait to
            time.sleep(GROUP_TIMEOUT_SECS + 5)
        write(self, *args)

    with mock.patch.object(OutputFile, 'write', write_slowly):
        return what_came(save_folder, engine.module, root / 'hf_model', bucket_size=4000, writer='stream')[1]


def test_on_a_slow_disk_the_others_wait_longer_than_their_group_would(tmp_path):
    assert min(run_ranks(save_slowly, 2, tmp_path, init=None)) > GROUP_TIMEOUT_SECS
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'hf_model')
