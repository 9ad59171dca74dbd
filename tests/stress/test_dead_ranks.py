"""Ranks that die beside a save: the others learn of it at once or within a bound of its own, whoever it was."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.zoo.llamas import llama

#: Far less than two hours, and far more than what a busy machine needs.
BOUND_SECS = 60
#: What a rank that leaves gives the others to answer, and more.
ENDING_SECS = 8


def call_without(dead_rank: int, out_dir: Path) -> tuple[str, float]:
    """Save, lose a rank between two steps, save; returns what a survivor got. Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks import save_hf
    from xhf_hooks.errors import XhfError

    model = llama()
    save_hf(model, out_dir)
    dist.barrier()
    if dist.get_rank() == dead_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        save_hf(model, out_dir)
    except XhfError as error:
        return f'{type(error).__name__}: {error}', time.monotonic() - started
    return 'no error', 0.0


def first_call_without(dead_rank: int, out_dir: Path) -> tuple[str, float]:
    """The same before the first save: the survivors look for a rank that never comes."""
    import torch.distributed as dist

    from xhf_hooks import collective, save_hf
    from xhf_hooks.errors import XhfError

    model = llama()
    dist.barrier()
    if dist.get_rank() == dead_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    shorter = partial(collective.Collective.__init__, connect_timeout_secs=5.0)
    try:
        with mock.patch.object(collective.Collective, '__init__', lambda self: shorter(self)):
            save_hf(model, out_dir)
    except XhfError as error:
        return f'{type(error).__name__}: {error}', time.monotonic() - started
    return 'no error', 0.0


@pytest.mark.parametrize(
    ('call', 'dead_rank', 'said'),
    [
        (call_without, 0, 'lost contact with the other ranks'),
        (call_without, 1, 'lost contact with the other ranks'),
        (first_call_without, 0, 'did not find all 2 ranks'),
    ],
)
def test_a_rank_that_died_between_two_saves_or_before_the_first_is_missed(tmp_path, call, dead_rank, said):
    survivors = run_ranks(call, 2, dead_rank, tmp_path / 'hf_model', expected_deaths={dead_rank}, init='torch')
    message, seconds = survivors[1 - dead_rank]
    assert message.startswith(f'RankLostError: rank {1 - dead_rank} {said}'), message
    assert seconds < BOUND_SECS


def lose_one_of_many(dead_rank: int) -> tuple[str, float]:
    """One dies between two agreements; returns what each survivor got. Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks.collective import Collective
    from xhf_hooks.errors import RankLostError

    ranks = Collective()
    ranks.agree('before')
    if dist.get_rank() == dead_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in range(3):
            ranks.agree('after')
    except RankLostError as error:
        again = ''
        try:
            ranks.agree('again')
        except RankLostError as second:
            again = str(second)
        return f'{error} / {again}', time.monotonic() - started
    return 'no error', 0.0


def test_all_others_learn_of_a_death_at_once_not_its_neighbours_alone():
    found = run_ranks(lose_one_of_many, 7, 5, expected_deaths={5}, init='torch')
    for rank in set(range(7)) - {5}:
        message, seconds = found[rank]
        assert f'rank {rank} lost contact with the other ranks' in message, message
        assert 'the connection broke earlier' in message, message
        assert seconds < BOUND_SECS


def ask_without(dead_rank: int, is_hung: bool) -> tuple[str, float]:
    """Lose a rank, or have one that never answers, between two iterations; returns what the others got."""
    import logging

    import torch.distributed as dist

    from xhf_hooks.background.save_on_signal import SaveRequests
    from xhf_hooks.errors import RankLostError
    from xhf_hooks.telemetry import RunLog

    requests = SaveRequests(RunLog(logging.getLogger('test'), 'test'), ['SIGUSR2'])
    assert [requests.is_due() for _ in range(3)] == [False] * 3
    dist.barrier()
    if dist.get_rank() == dead_rank:
        if is_hung:
            time.sleep(3 * ENDING_SECS)
        os.kill(os.getpid(), signal.SIGKILL)
    started, outcome = time.monotonic(), 'no error'
    try:
        for _ in range(1 if is_hung else 3):
            requests.is_due()
    except RankLostError as error:
        outcome = str(error)
    requests.close()
    return outcome, time.monotonic() - started


def test_a_rank_that_died_is_missed_at_the_end_of_the_next_iteration():
    found = run_ranks(ask_without, 3, 1, False, expected_deaths={1}, init='torch')
    for rank in (0, 2):
        message, seconds = found[rank]
        assert f"rank {rank} lost contact with the other ranks in stage 'save_on_signal'" in message, message
        assert seconds < BOUND_SECS


def test_a_rank_that_fails_does_not_wait_for_one_that_hangs():
    """Its question is still in flight, and torch would wait for that."""
    found = run_ranks(ask_without, 2, 1, True, expected_deaths={1}, init='torch')
    assert found[0][0] == 'no error' and found[0][1] < 2 * ENDING_SECS
