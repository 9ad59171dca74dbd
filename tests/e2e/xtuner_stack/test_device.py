"""XTuner's SupervisedFinetune on a simulated device: see tests/distributed/test_device.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_device import (
    WAYS,
    assert_same_bytes_within_a_bucket,
    build_model,
    save_and_measure,
    save_reference,
    whole_on_host,
)
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.engines import zero_engine

STAGES = (2, 3)


def save_case(stage: int, root: Path) -> dict[str, dict[str, Any]]:
    """Runs on: all ranks."""
    import torch
    from mmengine.config import ConfigDict
    from transformers import AutoModelForCausalLM
    from xtuner.model import SupervisedFinetune

    llm = dict(type=AutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path=str(root.parent / 'base'))
    model = SupervisedFinetune(ConfigDict(llm, torch_dtype=torch.bfloat16, attn_implementation='eager'))
    engine = zero_engine(model, stage, reduce_bucket_size=50_000)
    tokens = torch.arange(8, device='sim').reshape(1, -1)
    loss = engine({'input_ids': tokens, 'labels': tokens, 'attention_mask': torch.ones_like(tokens)}, mode='loss')
    engine.backward(loss['loss'])
    engine.step()
    save_reference(build_model(), whole_on_host(engine.module.llm), root / 'expected')
    return {way: save_and_measure(engine.module, root / way, **how) for way, how in WAYS.items()}


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('device')
    build_model().save_pretrained(root / 'base')
    scenarios = {str(stage): partial(save_case, stage, root / str(stage)) for stage in STAGES}
    return root, run_scenarios(scenarios, 2, init='sim')


@pytest.mark.parametrize('stage', STAGES)
def test_supervised_finetune_on_a_device(saved, stage):
    root, results = saved
    assert_same_bytes_within_a_bucket(root / str(stage), check(results, str(stage)))
