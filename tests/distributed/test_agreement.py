"""Ranks agree seldom while they gather: until they do, a rank that has failed helps the others to gather."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.engines import save_folder, zero_engine
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

WORLD_SIZE = 3


def count_agreements(root: Path) -> dict[str, Any]:
    """A save of many buckets, whole, then one in which a rank fails in the middle. Runs on: all ranks."""
    import torch.distributed as dist

    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks.distributed.collective import Collective
    from xhf_hooks.errors import AgreedError
    from xhf_hooks.sources import Zero3Source, gather
    from xhf_hooks.writers.file_io.output_file import OutputFile

    engine = zero_engine(odd_llama(bf16=True), stage=3)
    agreed: list[str] = []
    agree, group_chunks, write, gathered = (
        Collective.agree,
        gather.group_chunks,
        OutputFile.write,
        Zero3Source.gathered,
    )
    n_gathered, n_made, found = [], [], {}

    def note(self: Collective, stage: str, error: Exception | None = None) -> None:
        agreed.append(stage)
        agree(self, stage, error)

    def note_gathered(*args: Any, **options: Any) -> Any:
        n_gathered.append(1)
        return gathered(*args, **options)

    def fail_to_make(*args: Any) -> Any:
        n_made.append(1)
        if dist.get_rank() == 1 and len(n_made) == 2:
            raise OSError(5, 'injected')
        return group_chunks(*args)

    def fail_to_write(*args: Any) -> None:
        if dist.get_rank() == 2:
            raise OSError(28, 'injected')
        write(*args)

    faults = {
        'whole': mock.patch.object(gather, 'group_chunks', group_chunks),
        'gather': mock.patch.object(gather, 'group_chunks', fail_to_make),
        'write': mock.patch.object(OutputFile, 'write', fail_to_write),
    }
    how = dict(bucket_size=2000, writer='parallel')
    with (
        mock.patch.object(Collective, 'agree', note),
        mock.patch.object(Zero3Source, 'gathered', note_gathered),
        mock.patch.object(gather, 'BUCKETS_PER_AGREEMENT', 8),
    ):
        for what, fault in faults.items():
            agreed.clear(), n_gathered.clear(), n_made.clear()
            message = 'no error'
            with fault:
                try:
                    plan, _ = save_folder(engine.module, root / 'hf_model', **how)
                except AgreedError as error:
                    message = str(error)
            found[what] = (message, agreed.count('gather'), len(n_gathered), len(plan.buckets))
    return found


def test_few_agreements_and_no_rank_is_left_in_a_gather(tmp_path):
    everyones = run_ranks(count_agreements, WORLD_SIZE, tmp_path)
    for found in everyones:
        message, n_agreements, n_gathered, n_buckets = found['whole']
        assert message == 'no error' and n_gathered == n_buckets > 8
        assert n_agreements == -(-n_buckets // 8) + 1
    for what, rank in (('gather', 1), ('write', 2)):
        (outcome,) = {found[what] for found in everyones}  # the same message after as many gathers on every rank
        message, _, n_gathered, _ = outcome
        assert f"stage '{what}' failed on rank {rank}: OSError" in message, message
        assert n_gathered % 8 == 0 or n_gathered == n_buckets
