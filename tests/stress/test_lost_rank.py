"""A rank that dies in the middle of a save: the others get an error, and the previous save is whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.compare import assert_same_folder_tensors
from tests.helpers.engines import save_folder, zero_engine
from tests.helpers.ranks import run_ranks


def lose_rank_1(root: Path) -> str:
    """Runs on: all ranks; returns what the survivor got."""
    import torch.distributed as dist

    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks.errors import XhfError
    from xhf_hooks.sources import Zero3Source

    model = odd_llama(bf16=True)
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'expected')
    engine = zero_engine(model, stage=3)
    save_folder(engine.module, root / 'hf_model')

    gather = Zero3Source._gather_masters

    def die(*args: Any) -> dict[str, Any]:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(*args)

    with mock.patch.object(Zero3Source, '_gather_masters', die):
        try:
            save_folder(engine.module, root / 'hf_model', bucket_size=4000)
        except XhfError as error:
            return f'{type(error).__name__}: {error}'
    return 'no error'


def test_survivor_gets_an_error_and_nothing_is_lost(tmp_path):
    message, _ = run_ranks(lose_rank_1, 2, tmp_path, expected_deaths={1})
    assert message.startswith('RankLostError: rank 0 lost touch with the others')
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'hf_model')
    assert not list(tmp_path.glob('.hf_model.staging*'))
