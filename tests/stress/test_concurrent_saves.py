"""Eight processes save into one folder, again and again: the case in which Axolotl's users report "File exists"."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.helpers import frontends as doors
from tests.helpers.scenarios import check, run_scenarios
from tests.helpers.zoo.llamas import odd_llama

pytestmark = pytest.mark.modern_only

PROCESSES, SAVES = 8, 25
WRITERS = ('stream', 'parallel', 'positional')


def save_many_times(writer: str, in_background: bool, folder: Path) -> list[tuple[int, int]]:
    """Returns step and number of verified files of each save, on rank 0."""
    import json
    import logging

    import torch
    import torch.distributed as dist

    from xhf_hooks.config.options import RunOptions
    from xhf_hooks.manager import CheckpointManager
    from xhf_hooks.model import unwrap
    from xhf_hooks.planning.types import Step
    from xhf_hooks.telemetry import RunLog

    model = odd_llama()
    options = RunOptions(
        writer=writer, bucket_size=40_000, async_save=in_background, max_shard_size=30_000, on_error='raise'
    )
    log = RunLog.of_this_rank('crowd', logging.getLogger('xhf_hooks'))
    saves = CheckpointManager(unwrap(model), folder, options, log)
    saves.prepare(None, when='often')
    verified = []
    for step in range(1, SAVES + 1):
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        saves.save(Step('iter', step, step))
        saves.collect()
        if dist.get_rank() == 0:  # the others are at the next save already
            found = json.loads((folder / 'xhf_manifest.json').read_text())['iteration']
            verified.append((found, doors.verify_folder(folder)))
    saves.close()
    return verified


def one_call_each(folder: Path) -> list[str]:
    """By the call, which claims and releases the folder every time."""
    from xhf_hooks import save_hf

    model = odd_llama()
    return [save_hf(model, folder, writer=writer, step=step).step.label for step, writer in enumerate(WRITERS)]


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('crowd')
    scenarios = {w: partial(save_many_times, w, w == 'parallel', root / 'all' / 'hf_model') for w in WRITERS}
    scenarios['calls'] = partial(one_call_each, root / 'all' / 'hf_model')  # into the same folder
    return root, run_scenarios(scenarios, PROCESSES)


@pytest.mark.parametrize('writer', WRITERS)
def test_every_save_verifies(results, writer):
    _, outcomes = results
    verified = check(outcomes, writer)[0]
    assert [step for step, _ in verified] == list(range(1, SAVES + 1))
    assert all(files > 5 for _, files in verified)


def test_nothing_is_left_over(results):
    root, outcomes = results
    assert check(outcomes, 'calls') == [['iter_0', 'iter_1', 'iter_2']] * PROCESSES
    visible = [path.name for path in (root / 'all').iterdir() if not path.name.endswith('.lock')]
    assert visible == ['hf_model']
    doors.verify_folder(root / 'all' / 'hf_model')
