"""What has been gathered is there, though DeepSpeed waits for the last of its all-gathers only."""

from __future__ import annotations

from functools import partial

import pytest

from tests.helpers.scenarios import check, run_scenarios

N_LARGE = 4_000_000  # takes gloo some 10 ms
TIMES = 10


def count_missing(persistent: bool) -> dict[str, int]:
    """Elements of a large parameter that are not there yet when a small one is. Runs on: all ranks."""
    import torch
    from torch import nn

    from tests.helpers.engines import zero_engine
    from xhf_hooks.sources import source_for

    model = nn.Module()
    model.large, model.small = nn.Parameter(torch.ones(N_LARGE)), nn.Parameter(torch.ones(2))
    threshold = 10 * N_LARGE if persistent else 0
    engine = zero_engine(model, 3, stage3_param_persistence_threshold=threshold)
    source = source_for(engine.module)
    names = ['large', 'small']
    missing = {'gathered': 0, 'afterwards': 0}
    for _ in range(TIMES):
        # Fills new memory with NaN, for it may hold what was gathered there the last time
        torch.use_deterministic_algorithms(True)
        with source.opened(), source.gathered(names, wanted=names, use_fp32_master=False) as tensors:
            missing['gathered'] += int((tensors['large'] != 1).sum())
        missing['afterwards'] += int((model.large != 1).sum()) if persistent else 0
        torch.use_deterministic_algorithms(False)
    engine.destroy()
    return missing


@pytest.fixture(scope='module')
def counted():
    return run_scenarios({str(persistent): partial(count_missing, persistent) for persistent in (False, True)}, 2)


@pytest.mark.parametrize('persistent', ['False', 'True'], ids=['partitioned', 'persistent'])
def test_nothing_is_missing(counted, persistent):
    assert check(counted, persistent) == [{'gathered': 0, 'afterwards': 0}] * 2
