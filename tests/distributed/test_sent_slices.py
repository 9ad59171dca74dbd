"""Slices that travel to the rank that writes them: how many bytes, how much memory, and who writes."""

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

N_RANKS = 4
BUCKET_NBYTES = 16 * 10**6
#: For more files than ranks, so that in parallel each rank writes some.
SHARD_NBYTES = 10**7
WRITERS = ('stream', 'parallel')
#: Of a file at most, for more files than ranks, for fewer, and for one.
FILES = {'many files': 10_000, 'few files': 60_000, 'one file': 10**9}


def save_and_count(writer: str, stage: int, in_background: bool, root: Path) -> dict[str, int]:
    """Bytes that this rank sends in one save, whole tensors that it gathers, its memory. Runs on: all ranks."""
    import torch

    from tests.helpers.zoo.llamas import larger_llama
    from xhf_hooks.collective import Collective
    from xhf_hooks.sources import ModuleSource, Zero3Source

    engine = zero_engine(larger_llama().to(torch.bfloat16), stage)
    source = Zero3Source if stage == 3 else ModuleSource
    post, gathered = Collective.post, source.gathered
    sent, whole = [], []

    def count(self: Collective, outgoing: Any, *args: Any) -> Any:
        sent.extend(tensor.nbytes for tensor in outgoing.values())
        return post(self, outgoing, *args)

    def count_gathered(self: Any, names: Any, **options: Any) -> Any:
        whole.extend(names)
        return gathered(self, names, **options)

    how = dict(writer=writer, bucket_size=BUCKET_NBYTES, max_shard_size=SHARD_NBYTES, in_background=in_background)
    save_folder(engine.module, root / writer, **how)  # what the first save brings with it
    with (
        mock.patch.object(Collective, 'post', count),
        mock.patch.object(source, 'gathered', count_gathered),
        PeakSampler() as sampler,
    ):
        plan, _ = save_folder(engine.module, root / writer, **how)
    save_folder(engine.module, root / 'gather', writer='gather', max_shard_size=SHARD_NBYTES)
    engine.destroy()
    return {
        'sent': sum(sent),
        'most_at_once': max(sent, default=0),
        'gathered': len(whole),
        'memory': sampler.meter.peak_extra_nbytes,
        'weights': sum(placement.nbytes for placement in plan.placements),
    }


def save_in_files(root: Path, name: str) -> tuple[set[str], int]:
    """The files that this rank writes into, and how many there are. Runs on: all ranks."""
    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks.writers.output_file import OutputFile

    engine = zero_engine(odd_llama(bf16=True), 3)
    opened, make = [], OutputFile.__init__

    def note(self: OutputFile, path: Path, *args: Any, **options: Any) -> None:
        opened.append(path.name)
        make(self, path, *args, **options)

    with mock.patch.object(OutputFile, '__init__', note):
        plan, _ = save_folder(engine.module, root / name, writer='parallel', max_shard_size=FILES[name])
    save_folder(engine.module, root / f'{name}, gathered', writer='gather', max_shard_size=FILES[name])
    engine.destroy()
    return set(opened), len(plan.files)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('sent')
    scenarios: dict[str, Any] = {}
    for writer in WRITERS:
        scenarios[writer] = partial(save_and_count, writer, 3, False, root / writer)
        scenarios[f'{writer}, whole'] = partial(save_and_count, writer, 2, False, root / f'{writer}, whole')
    scenarios['whole, background'] = partial(save_and_count, 'stream', 2, True, root / 'background')
    scenarios |= {name: partial(save_in_files, root, name) for name in FILES}
    return root, run_scenarios(scenarios, N_RANKS)


@pytest.mark.parametrize('writer', WRITERS)
def test_each_byte_travels_once_at_most(saved, writer):
    root, results = saved
    ranks = check(results, writer)
    assert sum(rank['sent'] for rank in ranks) == ranks[0]['weights'] * (N_RANKS - 1) // N_RANKS
    assert [rank['gathered'] for rank in ranks] == [0] * N_RANKS
    assert (ranks[0]['sent'] == 0) == (writer == 'stream')
    assert_same_folder_tensors(root / writer / writer, root / writer / 'gather')


@pytest.mark.parametrize('writer', WRITERS)
def test_memory_is_that_of_a_few_buckets(saved, writer):
    _, results = saved
    first, *others = check(results, writer)
    assert first['weights'] > 3 * BUCKET_NBYTES
    assert first['memory'] < 3 * BUCKET_NBYTES, first
    for rank in others:
        assert rank['memory'] < (1 if writer == 'stream' else 3) * BUCKET_NBYTES, rank
        assert 0 < rank['most_at_once'] <= BUCKET_NBYTES / 4


@pytest.mark.parametrize('writer', WRITERS)
def test_what_every_rank_has_whole_does_not_travel(saved, writer):
    """As at ZeRO-2: its owner reads it, in parts."""
    root, results = saved
    ranks = check(results, f'{writer}, whole')
    assert [(rank['sent'], rank['gathered']) for rank in ranks] == [(0, 0)] * N_RANKS
    assert all(rank['memory'] < 3 * BUCKET_NBYTES for rank in ranks), ranks
    assert_same_folder_tensors(root / f'{writer}, whole' / writer, root / f'{writer}, whole' / 'gather')


def test_in_the_background_each_rank_copies_and_sends_its_share_of_it(saved):
    root, results = saved
    ranks = check(results, 'whole, background')
    assert [rank['sent'] > 0 for rank in ranks] == [False, True, True, True]
    assert sum(rank['sent'] for rank in ranks) == ranks[0]['weights'] * (N_RANKS - 1) // N_RANKS
    assert_same_folder_tensors(root / 'background' / 'stream', root / 'background' / 'gather')


@pytest.mark.parametrize('name', FILES)
def test_each_file_has_one_writer(saved, name):
    root, results = saved
    written, (n_files, *_) = zip(*check(results, name), strict=True)
    assert (n_files > N_RANKS, 1 < n_files < N_RANKS, n_files == 1) == tuple(name == wanted for wanted in FILES)
    names = [file for rank in written for file in rank]
    assert len(names) == len(set(names)) == n_files
    assert sum(map(bool, written)) == min(n_files, N_RANKS)
    assert_same_folder_tensors(root / name, root / f'{name}, gathered')
