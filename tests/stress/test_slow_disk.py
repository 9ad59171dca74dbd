"""A disk so slow that a save outlasts the process group's time-out: the ranks wait elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

from tests.helpers.compare import assert_same_folder_tensors
from tests.helpers.ranks import run_ranks

GROUP_TIMEOUT_SECS = 15  # on a busy machine ranks are seconds apart without a disk
DISK_DELAY_SECS = 20
WRITERS = ('stream', 'gather')


def save_slowly(root: Path) -> list[float]:
    """Runs on: all ranks; returns the seconds that saves took with each writer."""
    import deepspeed
    import torch.distributed as dist

    from tests.helpers.engines import save_folder, zero_engine
    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks.writers.output_file import OutputFile

    deepspeed.init_distributed(dist_backend='gloo', timeout=timedelta(seconds=GROUP_TIMEOUT_SECS))
    model = odd_llama(bf16=True)
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'expected')
    engine = zero_engine(model, stage=3)
    delays: list[object] = []

    def write_slowly(self: OutputFile, *args: object) -> None:
        delays.append(args)
        if len(delays) == 5:  # in the middle: the others are gathering or sending, or wait to
            time.sleep(DISK_DELAY_SECS)
        write(self, *args)

    write, seconds = OutputFile.write, []
    for writer in WRITERS:
        delays.clear()
        started = time.monotonic()
        with mock.patch.object(OutputFile, 'write', write_slowly):
            save_folder(engine.module, root / writer, bucket_size=4000, writer=writer)
        seconds.append(time.monotonic() - started)
    return seconds


def test_the_others_wait_longer_than_their_group_would(tmp_path):
    for seconds in run_ranks(save_slowly, 2, tmp_path, init=None):
        assert min(seconds) > GROUP_TIMEOUT_SECS
    for writer in WRITERS:
        assert_same_folder_tensors(tmp_path / 'expected', tmp_path / writer)
