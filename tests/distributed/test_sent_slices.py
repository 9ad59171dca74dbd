"""Slices that travel to the rank that writes them: how many bytes, and how much memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.compare import assert_same_folder_tensors
from tests.helpers.engines import save_folder, zero_engine
from tests.helpers.peak_sampler import PeakSampler
from tests.helpers.scenarios import check, run_scenarios

N_RANKS = 3
BUCKET_NBYTES = 16 * 10**6
WRITERS = ('stream', 'parallel')
#: For more files than ranks, so that in parallel each rank writes some.
SMALL: dict[str, Any] = dict(bucket_size=BUCKET_NBYTES, max_shard_size=10**7)


def save_and_count(stage: int, root: Path) -> dict[str, dict[str, int]]:
    """By way to save: bytes that this rank sends, whole tensors that it gathers, its memory. Runs on: all ranks."""
    import torch

    from tests.helpers.zoo.llamas import larger_llama
    from xhf_hooks.collective import Collective
    from xhf_hooks.sources import Source, Zero3Source

    model = zero_engine(larger_llama().to(torch.bfloat16), stage).module
    source = Zero3Source if stage == 3 else Source
    post, gathered = Collective.post, source.gathered
    sent, whole = [], []

    def count(self: Collective, outgoing: Any, *args: Any) -> Any:
        sent.extend(tensor.nbytes for tensor in outgoing.values())
        return post(self, outgoing, *args)

    def count_gathered(self: Any, names: Any, **options: Any) -> Any:
        whole.extend(names)
        return gathered(self, names, **options)

    found = {}
    save_folder(model, root / 'gather', writer='gather', **SMALL)
    for way in (*WRITERS, *(['background'] if stage == 2 else [])):
        how = {**SMALL, 'writer': way} if way in WRITERS else dict(SMALL, writer='stream', in_background=True)
        save_folder(model, root / way, **how)  # what the first save brings with it
        sent.clear(), whole.clear()
        with (
            mock.patch.object(Collective, 'post', count),
            mock.patch.object(source, 'gathered', count_gathered),
            PeakSampler() as sampler,
        ):
            plan, _ = save_folder(model, root / way, **how)
        found[way] = {
            'sent': sum(sent),
            'most_at_once': max(sent, default=0),
            'gathered': len(whole),
            'memory': sampler.meter.peak_extra_nbytes,
            'weights': sum(placement.nbytes for placement in plan.placements),
        }
    return found


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('sent')
    scenarios = {f'zero{stage}': partial(save_and_count, stage, root / f'zero{stage}') for stage in (2, 3)}
    return root, run_scenarios(scenarios, N_RANKS)


def counts_of(saved: Any, stage: int, way: str) -> list[dict[str, int]]:
    """On each rank, after the files have been compared."""
    root, results = saved
    ranks = [rank[way] for rank in check(results, f'zero{stage}')]
    assert_same_folder_tensors(root / f'zero{stage}' / way, root / f'zero{stage}' / 'gather')
    return ranks


def assert_others_sent_their_share(ranks: list[dict[str, int]]) -> None:
    sent = sum(rank['sent'] for rank in ranks)
    assert abs(sent - ranks[0]['weights'] * (N_RANKS - 1) / N_RANKS) < 0.01 * sent


@pytest.mark.parametrize('writer', WRITERS)
def test_each_byte_travels_once_at_most_through_a_few_buckets(saved, writer):
    ranks = counts_of(saved, 3, writer)
    first, *others = ranks
    assert_others_sent_their_share(ranks)
    assert [rank['gathered'] for rank in ranks] == [0] * N_RANKS
    assert (first['sent'] == 0) == (writer == 'stream')
    assert first['weights'] > 3 * BUCKET_NBYTES
    assert first['memory'] < 3 * BUCKET_NBYTES, first
    for rank in others:
        assert rank['memory'] < (1 if writer == 'stream' else 3) * BUCKET_NBYTES, rank
        assert 0 < rank['most_at_once'] <= BUCKET_NBYTES / N_RANKS + 1000


@pytest.mark.parametrize('writer', WRITERS)
def test_what_every_rank_has_whole_does_not_travel(saved, writer):
    """As at ZeRO-2: its owner reads it, in parts."""
    ranks = counts_of(saved, 2, writer)
    assert [(rank['sent'], rank['gathered']) for rank in ranks] == [(0, 0)] * N_RANKS
    assert all(rank['memory'] < 3 * BUCKET_NBYTES for rank in ranks), ranks


def test_in_the_background_each_rank_copies_and_sends_its_share_of_it(saved):
    ranks = counts_of(saved, 2, 'background')
    assert [rank['sent'] > 0 for rank in ranks] == [False] + [True] * (N_RANKS - 1)
    assert_others_sent_their_share(ranks)
