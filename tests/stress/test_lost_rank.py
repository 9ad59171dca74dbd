"""A rank that dies in the middle of a save: the others get an error, and the previous save is whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.compare import assert_same_folder_tensors
from tests.helpers.engines import save_folder, zero_engine
from tests.helpers.ranks import run_ranks


def lose_a_rank(dead_rank: int, writer: str, fault: str, root: Path) -> str:
    """Runs on: all ranks; returns what the survivor got.

    Args:
        fault: Method of the source in whose third call the rank dies, in the middle of buckets or rounds.
    """
    import torch.distributed as dist

    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks.errors import XhfError
    from xhf_hooks.sources import Zero3Source

    model = odd_llama(bf16=True)
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'expected')
    engine = zero_engine(model, stage=3)
    save_folder(engine.module, root / 'hf_model')

    calls, method = [], getattr(Zero3Source, fault)

    def die(*args: Any) -> Any:
        calls.append(1)
        if dist.get_rank() == dead_rank and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args)

    with mock.patch.object(Zero3Source, fault, die):
        try:
            save_folder(engine.module, root / 'hf_model', bucket_size=4000, writer=writer)
        except XhfError as error:
            return f'{type(error).__name__}: {error}'
    return 'no error'


@pytest.mark.parametrize(
    ('writer', 'fault', 'dead_rank'),
    [('gather', '_gather_partitions', 1), ('stream', 'local_shard', 1), ('parallel', 'local_shard', 0)],
)
def test_survivor_gets_an_error_and_nothing_is_lost(tmp_path, writer, fault, dead_rank):
    survivors = run_ranks(lose_a_rank, 2, dead_rank, writer, fault, tmp_path, expected_deaths={dead_rank})
    survivor = 1 - dead_rank
    assert survivors[survivor].startswith(f'RankLostError: rank {survivor} lost contact with the other ranks')
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'hf_model')
    if survivor == 0:  # which clears what it staged
        assert not list(tmp_path.glob('.hf_model.staging*'))
