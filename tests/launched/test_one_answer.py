"""The same weights give the same files, however the model is spread over ranks, memory and disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engines import save_folder, zero_engine
from tests.helpers.scenarios import check, run_scenarios

ENGINES: dict[str, dict[str, Any]] = {
    'zero0': dict(stage=0),
    'zero1': dict(stage=1),
    'zero2': dict(stage=2),
    'zero3': dict(stage=3),
    'zero3_default_persistence': dict(stage=3, stage3_param_persistence_threshold=100_000),
    'zero3_small_sub_groups': dict(stage=3, sub_group_size=1000),
    'zero3_cpu': dict(stage=3, offload_param=dict(device='cpu'), offload_optimizer=dict(device='cpu')),
    'zero3_nvme': dict(stage=3, offload_param=dict(device='nvme', buffer_count=8, buffer_size=20_000)),
}
MODELS = ('untied', 'tied', 'frozen')
BUCKETS = {'small_buckets': 5000, 'one_bucket': 10**9}
WORLD_SIZES = (2, *(pytest.param(n, marks=pytest.mark.modern_only) for n in (1, 3)))
CASES = [f'{model}-{engine}' for model in MODELS for engine in ENGINES]


def build_model(kind: str) -> Any:
    """A bf16 Llama; ``frozen`` has its embedding and first layer frozen."""
    import torch

    from tests.helpers.toy_run import ToyLM

    model = ToyLM(tied=kind == 'tied', use_cache=True).llm.to(torch.bfloat16)
    if kind == 'frozen':
        for name, parameter in model.named_parameters():
            parameter.requires_grad_('embed' not in name and 'layers.0' not in name)
    return model


def save_case(kind: str, engine_name: str, root: Path) -> None:
    """Runs on: all ranks."""
    import torch.distributed as dist

    options = dict(ENGINES[engine_name])
    if options.get('offload_param', {}).get('device') == 'nvme':
        options['offload_param'] = {**options['offload_param'], 'nvme_path': str(root / 'nvme')}
    model = build_model(kind)
    if dist.get_rank() == 0:
        model.save_pretrained(root / kind / 'expected')
    engine = zero_engine(model, **options)
    for bucket, nbytes in BUCKETS.items():
        save_folder(engine.module, root / f'{kind}-{engine_name}' / bucket, bucket_nbytes=nbytes)
    engine.destroy()


@pytest.fixture(scope='module', params=WORLD_SIZES, ids=['2ranks', '1ranks', '3ranks'])
def saved(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(f'one_answer{request.param}')
    scenarios = {f'{m}-{e}': partial(save_case, m, e, root) for m in MODELS for e in ENGINES}
    return root, run_scenarios(scenarios, request.param, timeout_secs=900)


@pytest.mark.parametrize('case', CASES)
def test_same_file_as_save_pretrained(saved, case):
    root, results = saved
    check(results, case)
    expected = root / case.split('-')[0] / 'expected'
    for bucket in BUCKETS:
        for name in ('model.safetensors', 'config.json', 'generation_config.json'):
            assert (root / case / bucket / name).read_bytes() == (expected / name).read_bytes(), name
