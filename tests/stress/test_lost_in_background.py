"""A rank that dies during a save in the background: the others get an error within seconds, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.compare import assert_same_folder_tensors
from tests.helpers.engines import save_folder, zero_engine
from tests.helpers.ranks import run_ranks

#: Far less than two hours, and far more than what a busy machine needs.
BOUND_SECS = 60


def lose_a_rank(dead_rank: int, writer: str, at_call: int, root: Path) -> tuple[str, float]:
    """Runs on: all ranks; returns what each survivor got, and when.

    Args:
        at_call: Of ``Collective.post``: the round of messages in which the rank dies.
    """
    import torch.distributed as dist

    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks.collective import Collective
    from xhf_hooks.errors import XhfError
    from xhf_hooks.model import unwrap
    from xhf_hooks.options import SaveOptions
    from xhf_hooks.places.checkpoint_folder import CheckpointFolder
    from xhf_hooks.planning.types import Step
    from xhf_hooks.save import Saver

    model = odd_llama(bf16=True)
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'expected')
    engine = zero_engine(model, stage=3)
    save_folder(engine.module, root / 'hf_model')

    calls, post = [], Collective.post

    def die(*args: Any) -> Any:
        calls.append(1)
        if dist.get_rank() == dead_rank and len(calls) == at_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return post(*args)

    saver = Saver(unwrap(engine), SaveOptions(bucket_size=4000), Collective(), writer=writer, in_background=True)
    saver.prepare()
    started = time.monotonic()
    with mock.patch.object(Collective, 'post', die):
        saver.start(CheckpointFolder(root / 'hf_model', 1), Step('iter', 1, 1))
        try:
            saver.outcome()
        except XhfError as error:
            return f'{type(error).__name__}: {error}', time.monotonic() - started
    return 'no error', time.monotonic() - started


@pytest.mark.parametrize(
    ('n_ranks', 'writer', 'dead_rank', 'at_call'), [(2, 'stream', 0, 1), (3, 'stream', 1, 3), (3, 'parallel', 2, 3)]
)
def test_survivors_get_an_error_at_once(tmp_path, n_ranks, writer, dead_rank, at_call):
    found = run_ranks(lose_a_rank, n_ranks, dead_rank, writer, at_call, tmp_path, expected_deaths={dead_rank})
    for rank in set(range(n_ranks)) - {dead_rank}:
        message, seconds = found[rank]
        assert message.startswith(f'RankLostError: rank {rank} lost contact with the other ranks'), message
        assert seconds < BOUND_SECS
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'hf_model')
