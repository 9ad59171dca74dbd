"""What ranks send each other: slices to the rank that writes them, what they agree on, checksums of their copies."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.checks.peak_sampler import sampled_memory
from tests.helpers.models.zoo.llamas import larger_llama, odd_llama
from tests.helpers.ranks.scenarios import check, error_of, run_scenarios
from tests.helpers.runs.engines import save_folder, zero_engine
from xhf_hooks import save_hf
from xhf_hooks.collective import Collective
from xhf_hooks.planning.write_strategy import WriteStrategy
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
        return message, sum(stage == road for _, stage, *_ in agreed), len(collectives), n_planned

    found = {}
    for road, module, name in (('gather', read, 'made_from'), ('send', send, '_fill')):
        are_sent = WriteStrategy.reads_slices if road == 'send' else False
        with (
            mock.patch.object(Collective, 'agree', noting(agreed, Collective.agree)),
            mock.patch.object(Collective, 'post', noting(collectives, Collective.post)),
            mock.patch.object(Zero3Source, 'gathered', noting(collectives, Zero3Source.gathered)),
            mock.patch.object(module, name, noting(made, getattr(module, name))),
            mock.patch.object(WriteStrategy, 'reads_slices', are_sent),
            mock.patch.object(read, 'BUCKETS_PER_AGREEMENT', EVERY),
            mock.patch.object(send, 'ROUNDS_PER_AGREEMENT', EVERY),
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
        found = Collective().all_gather(dist.get_rank())
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
    return error_of(save_folder, model, root / 'hf_model', **WAYS[way])


def buffers_are_of_rank_0(root: Path) -> bool:
    model = odd_llama(batch_norm=True)
    name, buffer = next((name, buffer) for name, buffer in model.named_buffers() if 'running_mean' in name)
    buffer.fill_(dist.get_rank())
    save_hf(model, root / 'hf_model')
    return bool(torch.count_nonzero(folder_tensors(root / 'hf_model')[name]) == 0)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('sent')
    scenarios = {f'zero{stage}': partial(save_and_count, stage, root / f'zero{stage}') for stage in (2, 3)}
    scenarios |= {way: partial(differing, way, root / way) for way in WAYS}
    scenarios['buffers'] = partial(buffers_are_of_rank_0, root / 'buffers')
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
