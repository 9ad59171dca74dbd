"""Ranks agree seldom while they gather or send: until they do, a rank that has failed helps the others along."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.engines import save_folder, zero_engine
from tests.helpers.ranks import run_ranks

WORLD_SIZE = 3


def count_agreements(root: Path) -> dict[str, Any]:
    """A save of many buckets, whole, then one in which a rank fails in the middle. Runs on: all ranks."""
    import torch.distributed as dist

    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks.collective import Collective
    from xhf_hooks.errors import AgreedError
    from xhf_hooks.sources import Zero3Source, read, send
    from xhf_hooks.writers.choose import WhoWrites
    from xhf_hooks.writers.output_file import OutputFile

    engine = zero_engine(odd_llama(bf16=True), stage=3)
    agreed: list[str] = []
    agree, made_from, write, gathered = (
        Collective.agree,
        read.made_from,
        OutputFile.write,
        Zero3Source.gathered,
    )
    post, fill = Collective.post, send._fill
    n_collectives, n_made, found = [], [], {}

    def note(self: Collective, stage: str, error: Exception | None = None) -> None:
        agreed.append(stage)
        agree(self, stage, error)

    def note_gathered(*args: Any, **options: Any) -> Any:
        n_collectives.append(1)
        return gathered(*args, **options)

    def note_posted(*args: Any) -> Any:
        n_collectives.append(1)
        return post(*args)

    def fail_on_rank_1(function: Any) -> Any:
        def fail(*args: Any) -> Any:
            n_made.append(1)
            if dist.get_rank() == 1 and len(n_made) == 2:
                raise OSError(5, 'injected')
            return function(*args)

        return fail

    def fail_to_write(*args: Any) -> None:
        if dist.get_rank() == 2:
            raise OSError(28, 'injected')
        write(*args)

    faults = {
        'gather': {
            'whole': nullcontext(),
            'gather': mock.patch.object(read, 'made_from', fail_on_rank_1(made_from)),
            'write': mock.patch.object(OutputFile, 'write', fail_to_write),
        },
        'send': {
            'whole': nullcontext(),
            'send': mock.patch.object(send, '_fill', fail_on_rank_1(fill)),
            'write': mock.patch.object(OutputFile, 'write', fail_to_write),
        },
    }
    are_sent = WhoWrites.receives_local_shards
    with (
        mock.patch.object(Collective, 'agree', note),
        mock.patch.object(Collective, 'post', note_posted),
        mock.patch.object(Zero3Source, 'gathered', note_gathered),
        mock.patch.object(read, 'BUCKETS_PER_AGREEMENT', 8),
        mock.patch.object(send, 'ROUNDS_PER_AGREEMENT', 8),
    ):
        for road in ('gather', 'send'):
            for what, fault in faults[road].items():
                agreed.clear(), n_collectives.clear(), n_made.clear()
                message = 'no error'
                sending = mock.patch.object(WhoWrites, 'receives_local_shards', are_sent if road == 'send' else False)
                with fault, sending:
                    try:
                        plan, _ = save_folder(
                            engine.module, root / 'hf_model', bucket_size=2000, max_shard_size=20_000, writer='parallel'
                        )
                    except AgreedError as error:
                        message = str(error)
                n_planned = len(plan.buckets) + len(plan.rounds)
                found[road, what] = (message, agreed.count(road), len(n_collectives), n_planned)
    return found


@pytest.fixture(scope='module')
def counted(tmp_path_factory):
    return run_ranks(count_agreements, WORLD_SIZE, tmp_path_factory.mktemp('agreement'))


@pytest.mark.parametrize('road', ['gather', 'send'])
def test_few_agreements_and_no_rank_is_left_behind(counted, road):
    for found in counted:
        message, n_agreements, n_collectives, n_planned = found[road, 'whole']
        assert message == 'no error' and n_collectives == n_planned > 8
        assert n_agreements == -(-n_planned // 8) + 1
    for what, rank in ((road, 1), ('write', 2)):
        (outcome,) = {found[road, what] for found in counted}  # the same message after as many on every rank
        message, _, n_collectives, _ = outcome
        assert f"stage '{what}' failed on rank {rank}: OSError" in message, message
        assert n_collectives % 8 == 0 or n_collectives == n_planned
