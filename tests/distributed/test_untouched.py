"""A run with the hook trains to the same weights and optimizer state, bit for bit, as a run without it."""

import random
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from mmengine.registry import MODELS
from torch import nn
from transformers import LlamaForCausalLM

from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.engines import zero_engine
from tests.helpers.runs.toy_run import ToyLM, run_config, train
from xhf_hooks.sources import source_for

#: Stage, fields of zero_optimization, and the model: small parameters may stay whole on every rank between iterations.
ENGINES: dict[str, tuple[int, dict[str, Any], str]] = {
    'zero2': (2, {}, 'DrawingLM'),
    'zero3': (3, {}, 'DrawingLM'),
    'zero3_persistent': (3, dict(stage3_param_persistence_threshold=100_000), 'ToyLM'),
}
N_LARGE = 4_000_000  # takes gloo some 10 ms
TIMES = 5
MAX_ITERS = 7  # with accumulation over 3, saves fall into the middle of an accumulation


class DrawingLlama(LlamaForCausalLM):
    """A class that draws from the generators of torch, numpy and Python whenever it is built."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.drawn = draw()


@MODELS.register_module()
class DrawingLM(ToyLM):
    """Its loss depends on the generators, and so do its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = DrawingLlama(self.llm.config)

    def forward(self, input_ids: torch.Tensor, mode: str = 'loss') -> Any:
        (loss,) = super().forward(input_ids, 'predict')
        return {'loss': loss * sum(draw())} if mode == 'loss' else [loss]


def draw() -> list[float]:
    """A number of each generator; on the meta device, too."""
    return [torch.rand(1, device='cpu').item(), np.random.rand(), random.random()]


def train_both(stage: int, zero: dict[str, Any], model: str, root: Path) -> list[list[float]]:
    """With the hook and without; returns what the generators draw after each. Runs on: all ranks.

    After a step DeepSpeed gathers persistent parameters and waits for the last of them only, which with gloo says
    nothing of the others (see ``xhf_hooks/sources/zero3.py``): now and then it trains on memory that nothing
    initialised, and never the same twice. So each is waited for here.
    """
    start = deepspeed.comm.all_gather_into_tensor

    def waited_for(*args: Any, **options: Any) -> Any:
        handle = start(*args, **options)
        if handle is not None:
            handle.wait()
        return handle

    drawn = []
    how: dict[str, Any] = dict(stage=stage, max_iters=MAX_ITERS, accumulate=3, zero=zero, model=dict(type=model))
    with mock.patch.object(deepspeed.comm, 'all_gather_into_tensor', waited_for):
        for name, hook in (('with', {'interval': 2, 'by_epoch': False}), ('without', None)):
            train(run_config(root / name, hook=hook, **how))
            drawn.append(draw())
    return drawn


def count_missing(persistent: bool) -> dict[str, int]:
    """Elements of a large parameter that are not there yet when a small one is. Runs on: all ranks.

    DeepSpeed waits for the last of its all-gathers only.
    """
    model = nn.Module()
    model.large, model.small = nn.Parameter(torch.ones(N_LARGE)), nn.Parameter(torch.ones(2))
    threshold = 10 * N_LARGE if persistent else 0
    engine = zero_engine(model, 3, stage3_param_persistence_threshold=threshold)
    source = source_for(engine.module)
    missing = {'gathered': 0, 'afterwards': 0}
    for _ in range(TIMES):
        # Fills new memory with NaN, for it may hold what was gathered there the last time
        torch.use_deterministic_algorithms(True)
        with source.opened():
            tensors = source.gathered(source.specs(), wanted=['large', 'small'])
            missing['gathered'] += int((tensors['large'] != 1).sum())
        missing['afterwards'] += int((model.large != 1).sum()) if persistent else 0
        torch.use_deterministic_algorithms(False)
    engine.destroy()
    return missing


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp('untouched')
    scenarios: dict[str, Any] = {name: partial(train_both, *how, root / name) for name, how in ENGINES.items()}
    scenarios |= {f'arrival_{persistent}': partial(count_missing, persistent) for persistent in (False, True)}
    return run_scenarios(scenarios, 2, root=root)


@pytest.mark.parametrize('name', ENGINES)
def test_same_weights_and_optimizer_state(trained, name):
    for drawn_with, drawn_without in check(trained, name):
        assert drawn_with == drawn_without
    assert list((trained.root / name / 'with').glob('*/hf_model/model.safetensors'))
    assert _differing(trained.root / name / 'with', trained.root / name / 'without') == []


@pytest.mark.parametrize('persistent', [False, True])
def test_what_has_been_gathered_is_there(trained, persistent):
    assert check(trained, f'arrival_{persistent}') == [{'gathered': 0, 'afterwards': 0}] * 2


def _differing(one: Path, other: Path) -> list[str]:
    """Names of the tensors; pytest takes an hour for the difference of their bytes."""
    states = [_final_state(work_dir) for work_dir in (one, other)]
    return [name for name in states[0].keys() | states[1].keys() if states[0].get(name) != states[1].get(name)]


def _final_state(work_dir: Path) -> dict[str, bytes]:
    """Every tensor, weights and optimizer state, of the checkpoint that ``last_checkpoint`` names."""
    checkpoint = Path((work_dir / 'last_checkpoint').read_text())
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.glob('*.pt'))
    state: dict[str, bytes] = {}
    for file in files:
        content = torch.load(file, map_location='cpu', weights_only=False)
        _collect(file.name, content, state)
    assert any('exp_avg' in name for name in state)
    if checkpoint.is_dir():
        masters = get_fp32_state_dict_from_zero_checkpoint(str(work_dir), tag=checkpoint.name)
        _collect('masters', masters, state)
    return state


def _collect(path: str, value: object, into: dict[str, bytes]) -> None:
    if isinstance(value, torch.Tensor):
        into[path] = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        for key, item in value.items():
            # Timings and the run's own config text differ; so does what stands in the padding of ZeRO-3's
            # partitions, which nothing initialises. The masters are compared without padding.
            if key not in ('message_hub', 'meta', 'fp32_flat_groups'):
                _collect(f'{path}/{key}', item, into)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _collect(f'{path}/{index}', item, into)
