"""Ranks agree seldom while they gather or send: until they do, a rank that has failed helps the others along."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.engines import save_folder, zero_engine
from tests.helpers.ranks import run_ranks

EVERY = 8


def count_agreements(root: Path) -> dict[str, list[tuple[str, int, int, int]]]:
    """By road, of a save of many buckets, and of one in which rank 1 fails in the middle: the error, and how many
    agreements and collectives there were, and should be. By 'memory', of one in which rank 1 has none for a bucket.

    Runs on: all ranks.
    """
    import torch
    import torch.distributed as dist

    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks.collective import Collective
    from xhf_hooks.errors import AgreedError
    from xhf_hooks.places.who_writes import WhoWrites
    from xhf_hooks.sources import Zero3Source, read, send

    model = zero_engine(odd_llama(bf16=True), stage=3).module
    allocate = torch.empty
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
        message, plan = 'no error', None
        try:
            plan, _ = save_folder(model, root / road, bucket_size=2000, max_shard_size=20_000, writer='parallel')
        except AgreedError as error:
            message = str(error)
        n_planned = len(plan.buckets) + len(plan.rounds) if plan else 0
        return message, sum(stage == road for _, stage, *_ in agreed), len(collectives), n_planned

    def allocate_little(*size: Any, **options: Any) -> torch.Tensor:
        if dist.get_rank() == 1 and isinstance(size[0], int) and size[0] > 500:
            raise torch.cuda.OutOfMemoryError('injected')
        return allocate(*size, **options)

    found = {}
    with (
        mock.patch.object(torch, 'empty', allocate_little),
        mock.patch.object(WhoWrites, 'receives_local_shards', False),
    ):
        found['memory'] = [save('gather')]
    for road, module, name in (('gather', read, 'made_from'), ('send', send, '_fill')):
        are_sent = WhoWrites.receives_local_shards if road == 'send' else False
        with (
            mock.patch.object(Collective, 'agree', noting(agreed, Collective.agree)),
            mock.patch.object(Collective, 'post', noting(collectives, Collective.post)),
            mock.patch.object(Zero3Source, 'gathered', noting(collectives, Zero3Source.gathered)),
            mock.patch.object(module, name, noting(made, getattr(module, name))),
            mock.patch.object(WhoWrites, 'receives_local_shards', are_sent),
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
    import torch
    import torch.distributed as dist

    from xhf_hooks.collective import Collective

    dist.group.WORLD.bound_device_id = torch.device('xpu:0')
    found = Collective().all_gather(dist.get_rank())
    assert dist.group.WORLD.bound_device_id == torch.device('xpu:0')
    return found


def test_the_ranks_group_needs_no_backend_of_the_runs_device():
    assert run_ranks(ranks_beside_a_bound_device, 2) == [[0, 1]] * 2


@pytest.fixture(scope='module')
def counted(tmp_path_factory):
    return run_ranks(count_agreements, 3, tmp_path_factory.mktemp('agreement'))


@pytest.mark.parametrize('road', ['gather', 'send'])
def test_few_agreements_and_no_rank_is_left_behind(counted, road):
    for message, n_agreements, n_collectives, n_planned in (found[road][0] for found in counted):
        assert message == 'no error' and n_collectives == n_planned > EVERY
        assert n_agreements == -(-n_planned // EVERY) + 1
    (failed,) = {found[road][1] for found in counted}  # the same message after as many on every rank
    message, _, n_collectives, _ = failed
    assert f"stage '{road}' failed on rank 1: OSError" in message, message
    assert n_collectives % EVERY == 0


def test_a_rank_without_memory_for_a_bucket_says_so_before_it_is_gathered(counted):
    (message,) = {found['memory'][0][0] for found in counted}
    assert "stage 'gather' failed on rank 1: OutOfMemoryError: injected" in message
