"""A disk so slow that a save outlasts the process group's time-out: the ranks wait elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.ranks.launch import run_ranks

GROUP_TIMEOUT_SECS = 15  # on a busy machine ranks are seconds apart without a disk


def save_slowly(root: Path) -> float:
    """Runs on: all ranks; returns the seconds that the save took."""
    import deepspeed
    import torch.distributed as dist

    from tests.helpers.models.zoo.llamas import odd_llama
    from tests.helpers.runs.engines import save_folder, zero_engine
    from xhf_hooks.writers.output_file import OutputFile

    deepspeed.init_distributed(dist_backend='gloo', timeout=timedelta(seconds=GROUP_TIMEOUT_SECS))
    model = odd_llama(bf16=True)
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'expected')
    engine = zero_engine(model, stage=3)
    write, calls = OutputFile.write, []

    def write_slowly(self: OutputFile, *args: object) -> None:
        calls.append(args)
        if len(calls) == 5:  # in the middle: the others are sending, or wait to
            time.sleep(GROUP_TIMEOUT_SECS + 5)
        write(self, *args)

    started = time.monotonic()
    with mock.patch.object(OutputFile, 'write', write_slowly):
        save_folder(engine.module, root / 'hf_model', bucket_size=4000, writer='stream')
    return time.monotonic() - started


def test_the_others_wait_longer_than_their_group_would(tmp_path):
    assert min(run_ranks(save_slowly, 2, tmp_path, init=None)) > GROUP_TIMEOUT_SECS
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'hf_model')
