"""What ranks send each other: slices to the rank that writes them, what they agree on, checksums of their copies."""

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.checks.peak_sampler import sampled_memory
from tests.helpers.models.zoo.llamas import larger_llama, odd_llama
from tests.helpers.ranks.launch import run_ranks
from tests.helpers.ranks.scenarios import check, error_of, run_scenarios
from tests.helpers.runs.engines import save_folder, zero_engine
from xhf_hooks import save_hf
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.ranks import collective
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.ranks.compare_ranks import require_same
from xhf_hooks.sources import Source, Zero3Source, read, send

N_RANKS = 3
BUCKET_NBYTES = 16 * 10**6
WRITERS = ('stream', 'parallel')
EVERY = 8  # buckets, or rounds of sending, for one agreement
#: For more files than ranks, so that in parallel each rank writes some.
SMALL: dict[str, Any] = dict(bucket_size=BUCKET_NBYTES, max_shard_size=10**7)
#: Ways to save copies of a model, to options of `save_folder`.
WAYS: dict[str, dict[str, Any]] = {
    'positional': dict(writer='positional'),
    'positional, float32': dict(writer='positional', dtype='float32'),
    'parallel': dict(writer='parallel'),
    'stream, in the background': dict(writer='stream', in_background=True),
    'gather': dict(writer='gather'),
}
CHANGED = 'model.layers.1.mlp.up_proj.weight'
#: What ranks compare: many lines, each of some length.
LINES = [f'{number} {"of a tensor" * 50}' for number in range(2000)]
OTHER_LINES = {
    'one is another': [*LINES[:1000], 'another', *LINES[1001:]],
    'some are missing': LINES[:1500],
    'some are too many': [*LINES, 'another'],
}


def save_and_count(stage: int, root: Path) -> dict[str, dict[str, int]]:
    """By way to save: bytes that this rank sends, whole tensors that it gathers, its memory. Runs on: all ranks."""
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
            sampled_memory() as memory,
        ):
            plan, _ = save_folder(model, root / way, **how)
        found[way] = {
            'sent': sum(sent),
            'most_at_once': max(sent, default=0),
            'gathered': len(whole),
            'memory': memory.peak_extra_nbytes,
            'weights': sum(placement.nbytes for placement in plan.placements),
        }
    return found


def count_agreements(root: Path) -> dict[str, list[tuple[str, int, int, int]]]:
    """By road, of a save of many buckets, and of one in which rank 1 fails in the middle: the error, and how many
    agreements and collectives there were, and should be. Runs on: all ranks.
    """
    model = zero_engine(odd_llama(bf16=True), stage=3).module
    agreed, collectives, made, fails = [], [], [], []

    def noting(notes: list[Any], function: Any) -> Any:
        def note(*args: Any, **options: Any) -> Any:
            notes.append(args)
            # With enable_sanity_checks DeepSpeed all-reduces when it frees them: not while a rank waits for its disk
            assert notes is not made or not any(parameter.numel() for parameter in model.parameters())
            if notes is made and fails and dist.get_rank() == 1 and len(made) == 2:
                raise OSError(5, 'injected')
            return function(*args, **options)

        return note

    def save(road: str) -> tuple[str, int, int, int]:
        agreed.clear(), collectives.clear(), made.clear()
        plans: list[Any] = []

        def save_small() -> None:
            plans.extend(save_folder(model, root / road, bucket_size=2000, max_shard_size=20_000, writer='parallel'))

        message = error_of(save_small)
        n_planned = len(plans[0].buckets) + len(plans[0].rounds) if plans else 0
        return message, sum(stage == road for _, _, stage in agreed), len(collectives), n_planned

    found = {}
    for road, module, name in (('gather', read, 'made_from'), ('send', send, '_fill')):
        are_sent = WriteStrategy.reads_slices if road == 'send' else False
        with (
            mock.patch.object(Collective, 'vote_any', noting(agreed, Collective.vote_any)),
            mock.patch.object(Collective, 'post', noting(collectives, Collective.post)),
            mock.patch.object(Zero3Source, 'gathered', noting(collectives, Zero3Source.gathered)),
            mock.patch.object(module, name, noting(made, getattr(module, name))),
            mock.patch.object(WriteStrategy, 'reads_slices', are_sent),
            mock.patch.object(read, 'BUCKETS_PER_VOTE', EVERY),
            mock.patch.object(send, 'ROUNDS_PER_VOTE', EVERY),
        ):
            fails.clear()
            found[road] = [save(road)]
            fails.append(True)
            found[road].append(save(road))
    return found


def ranks_beside_a_bound_device() -> list[int]:
    """As after ``init_process_group(device_id=...)`` with a device for which gloo has no backend."""
    dist.group.WORLD.bound_device_id = torch.device('xpu:0')
    try:
        found = Collective.connect().from_all_ranks('exchange', dist.get_rank)
        assert dist.group.WORLD.bound_device_id == torch.device('xpu:0')
    finally:
        dist.group.WORLD.bound_device_id = None
    return found


def differing(way: str, root: Path) -> str:
    """One bit of the last element is another on the last rank: the error. Runs on: all ranks."""
    model = odd_llama(bf16=True)
    save_folder(model, root / 'hf_model', **WAYS[way])
    changed = dict(model.named_parameters())[CHANGED]
    if dist.get_rank() == dist.get_world_size() - 1:
        changed.data.view(torch.int16)[-1, -1] ^= 1
    with mock.patch.object(Collective, '_all_gather', side_effect=AssertionError('a checksum of each tensor and rank')):
        return error_of(save_folder, model, root / 'hf_model', **WAYS[way])


def buffers_are_of_rank_0(root: Path) -> bool:
    model = odd_llama(batch_norm=True)
    name, buffer = next((name, buffer) for name, buffer in model.named_buffers() if 'running_mean' in name)
    buffer.fill_(dist.get_rank())
    save_hf(model, root / 'hf_model')
    return bool(torch.count_nonzero(folder_tensors(root / 'hf_model')[name]) == 0)


@contextmanager
def gathered_nbytes() -> Iterator[list[int]]:
    """Bytes of each value that this rank gathers from all ranks or is told by rank 0."""
    sizes: list[int] = []
    all_gather, broadcast = Collective._all_gather, Collective._broadcast

    def gather(self: Collective, value: Any) -> Any:
        found = all_gather(self, value)
        sizes.extend(len(pickle.dumps(each)) for each in found)
        return found

    def told(self: Collective, value: Any) -> Any:
        found = broadcast(self, value)
        sizes.append(len(pickle.dumps(found)))
        return found

    with mock.patch.object(Collective, '_all_gather', gather), mock.patch.object(Collective, '_broadcast', told):
        yield sizes


def differing_lines(last: list[str]) -> tuple[str, int]:
    """The last rank holds other lines: the error, and the bytes that a rank gathers. Runs on: all ranks."""
    ranks = Collective.connect()
    lines = last if ranks.rank == N_RANKS - 1 else LINES
    with gathered_nbytes() as sizes:
        message = error_of(require_same, ranks, 'the plan', str(len(lines)) + lines[1000], lambda: lines)
    ranks.close()
    return message, sum(sizes)


def agreements_of_many_ranks() -> dict[str, Any]:
    """As agreements of more ranks than take gloo's ring: what each says, and steps of one. Runs on: all ranks."""
    found: dict[str, Any] = {}
    ranks, isend, steps = Collective.connect(), dist.isend, list[int]()

    def count(*args: Any) -> Any:
        steps.append(1)
        return isend(*args)

    with mock.patch.object(collective, '_RING_RANKS', 1), mock.patch.object(dist, 'isend', count):
        for rank in range(ranks.world_size):
            found[f'flag of {rank}'] = ranks.vote_any(ranks.rank == rank)
            with ranks.remembering('write'):
                if ranks.rank == rank:
                    raise OSError(5, 'injected')
            found[f'error of {rank}'] = error_of(ranks.raise_if_any_failed, 'write')
        steps.clear()
        found['nobody'] = ranks.vote_any(False)
        found['steps'] = len(steps)
    ranks.close()
    return found


def exchanges() -> dict[str, list[Any]]:
    """What ranks exchange before, while and after a rank fails to compute its part. Runs on: all ranks."""
    ranks, failing = Collective.connect(), [-1]

    def compute() -> int:
        if ranks.rank == failing[0]:
            raise OSError(5, 'injected')
        return ranks.rank + 1

    ways = {
        'from rank 0': lambda: ranks.from_rank0('write', compute),
        'from all ranks': lambda: ranks.from_all_ranks('write', compute),
        'reduced': lambda: [
            merged.tolist()
            for merged in ranks.reduce_over_ranks(
                'write', lambda: (np.array([compute(), 2**40]), np.zeros((2, 0), int), np.array([8])), ('SUM',) * 3
            )
        ],
    }
    found: dict[str, list[Any]] = {}
    for name, exchange in ways.items():
        found[name] = [exchange()]
        failing[0] = 0 if name == 'from rank 0' else N_RANKS - 1
        found[name].append(error_of(exchange))
        failing[0] = -1
        found[name].append(exchange())
    ranks.close()
    return found


def waits_long_in_debug_mode() -> str:
    """Rank 0 works for longer than connecting may take, and torch checks each collective. Runs on: all ranks."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with mock.patch.object(collective, 'CONNECT_TIMEOUT_SECS', 2.0):
            ranks = Collective.connect()
    finally:
        dist.set_debug_level(level)
    if ranks.rank == 0:
        time.sleep(5)
    message = error_of(ranks.raise_if_any_failed, 'write')
    ranks.close()
    return message


def into_different_folders(root: Path) -> list[str]:
    """Each rank has a folder of its own, as if it trained a model of its own. Runs on: all ranks."""
    model, rank = odd_llama(), dist.get_rank()
    folders = [root / f'model{rank}' / 'hf_model', root / f'hf_model{rank}']
    return [error_of(save_hf, model, out, writer=writer) for out in folders for writer in ('auto', 'stream')]


def into_one_folder_under_other_paths(root: Path) -> str:
    """As where hosts mount a file system at different paths. Runs on: all ranks."""
    path = root / f'host{dist.get_rank()}'
    if dist.get_rank() == 0:
        (root / 'disk').mkdir(parents=True)
    dist.barrier()
    path.symlink_to(root / 'disk')
    return error_of(save_hf, odd_llama(), path / 'hf_model')


def save_own(seed: int, folder: Path) -> str:
    model = odd_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    return error_of(save_hf, model, folder)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('sent')
    scenarios = {f'zero{stage}': partial(save_and_count, stage, root / f'zero{stage}') for stage in (2, 3)}
    scenarios |= {way: partial(differing, way, root / way) for way in WAYS}
    scenarios['buffers'] = partial(buffers_are_of_rank_0, root / 'buffers')
    scenarios |= {name: partial(differing_lines, lines) for name, lines in OTHER_LINES.items()}
    scenarios['many ranks'] = agreements_of_many_ranks
    scenarios['exchanges'] = exchanges
    scenarios['debug mode'] = waits_long_in_debug_mode
    scenarios['other folders'] = partial(into_different_folders, root / 'other_folders')
    scenarios['other paths'] = partial(into_one_folder_under_other_paths, root / 'other_paths')
    scenarios |= {'agreements': partial(count_agreements, root / 'agreements'), 'bound': ranks_beside_a_bound_device}
    return run_scenarios(scenarios, N_RANKS, root=root)


def counts_of(saved: Any, stage: int, way: str) -> list[dict[str, int]]:
    """On each rank, after the files have been compared."""
    ranks = [rank[way] for rank in check(saved, f'zero{stage}')]
    assert_same_folder_tensors(saved.root / f'zero{stage}' / way, saved.root / f'zero{stage}' / 'gather')
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


@pytest.mark.parametrize('road', ['gather', 'send'])
def test_few_agreements_and_no_rank_is_left_behind(saved, road):
    counted = check(saved, 'agreements')
    for message, n_agreements, n_collectives, n_planned in (found[road][0] for found in counted):
        assert message == '' and n_collectives == n_planned > EVERY
        assert n_agreements == -(-n_planned // EVERY) + 1
    (failed,) = {found[road][1] for found in counted}  # the same message after as many on every rank
    message, _, n_collectives, _ = failed
    assert f"stage '{road}' failed on rank 1: OSError" in message, message
    assert n_collectives % EVERY == 0


def test_the_ranks_group_needs_no_backend_of_the_runs_device(saved):
    assert check(saved, 'bound') == [[0, 1, 2]] * N_RANKS


# Copies of a model


@pytest.mark.parametrize('way', WAYS)
def test_different_copies_are_not_stitched_together(saved, way):
    (message,) = {*check(saved, way)}
    assert message.startswith(f'RanksDifferError: {CHANGED}: ')
    assert f'found other values on ranks [{N_RANKS - 1}] than on rank 0 (in 1 of ' in message
    folder = saved.root / way / 'hf_model'
    assert_whole(folder)
    before = folder_tensors(folder)
    model = odd_llama(bf16=True)
    assert all(bool((before[name] == parameter).all()) for name, parameter in model.named_parameters())
    assert sorted(path.name for path in (saved.root / way).iterdir() if not path.name.startswith('.')) == ['hf_model']


def test_buffers_may_differ(saved):
    assert check(saved, 'buffers') == [True] * N_RANKS


# What differs is found without sending it all


@pytest.mark.parametrize(
    ('case', 'line', 'sides'),
    [
        ('one is another', 1000, ("'1000 of a tensor", "'another'")),
        ('some are missing', 1500, ("'1500 of a tensor", 'nothing more')),
        ('some are too many', 2000, ('nothing more', "'another'")),
    ],
)
def test_the_first_line_that_differs_is_found_without_sending_all(saved, case, line, sides):
    for message, nbytes in check(saved, case):
        assert message.startswith(
            f'RanksDifferError: the plan differs between ranks 0 and [{N_RANKS - 1}]: line {line} is {sides[0]}'
        )
        assert f' on rank 0 and {sides[1]} on rank {N_RANKS - 1}. All ranks' in message
        assert nbytes < 10 * len(LINES)  # eight bytes a line, of rank 0 alone, and two lines


def test_an_agreement_of_many_ranks_takes_few_steps(saved):
    for found in check(saved, 'many ranks'):
        for rank in range(N_RANKS):
            assert found[f'flag of {rank}'] is True
            assert found[f'error of {rank}'].startswith(f"AgreedError: stage 'write' failed on rank {rank}: OSError: ")
        assert found['nobody'] is False and found['steps'] == 2  # of three ranks; the ring has four


@pytest.mark.parametrize(
    ('way', 'result', 'failing'),
    [
        ('from rank 0', 1, 0),
        ('from all ranks', [1, 2, 3], N_RANKS - 1),
        ('reduced', [[6, N_RANKS * 2**40], [[], []], [8 * N_RANKS]], N_RANKS - 1),
    ],
)
def test_what_is_exchanged_is_computed_under_a_vote(saved, way, result, failing):
    """No rank that computed its part waits for one that could not."""
    for before, message, after in (found[way] for found in check(saved, 'exchanges')):
        assert message.startswith(f"AgreedError: stage 'write' failed on rank {failing}: OSError: "), message
        assert before == after == result


def test_in_debug_mode_ranks_are_waited_for_as_long(saved):
    assert check(saved, 'debug mode') == [''] * N_RANKS


# Several models in one job


def test_ranks_with_different_folders_are_told_before_anything_is_saved(saved):
    for messages in check(saved, 'other folders'):
        for message in messages:
            assert message.startswith('RanksDifferError: out_dir differs between ranks: ')
            assert message.count(str(saved.root / 'other_folders')) == N_RANKS
    left = [path for path in (saved.root / 'other_folders').rglob('*') if not path.is_dir()]
    assert left == []


def test_one_folder_may_have_another_path_on_each_host(saved):
    assert check(saved, 'other paths') == [''] * N_RANKS
    assert_whole(saved.root / 'other_paths' / 'disk' / 'hf_model')


def test_each_model_is_saved_by_a_job_of_its_own(tmp_path):
    """The remedy that both messages name."""
    with ThreadPoolExecutor(2) as jobs:
        folders = [tmp_path / f'model{seed}' / 'hf_model' for seed in range(2)]
        runs = [jobs.submit(run_ranks, save_own, 2, seed, folder) for seed, folder in enumerate(folders)]
        assert [run.result() for run in runs] == [['', '']] * 2
    one, other = map(folder_tensors, folders)
    assert not torch.equal(one[CHANGED], other[CHANGED])
