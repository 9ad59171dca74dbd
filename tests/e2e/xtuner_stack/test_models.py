"""XTuner's own model classes, without training: what goes out is what XTuner's own tools make of them."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModel

from tests.e2e.xtuner_stack.classes import deepseek_v2, internlm2, mixtral
from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.models.adapted import adapt, around, refusal
from tests.helpers.models.zoo import NOISE_STD
from tests.helpers.runs.engines import save_folder
from xhf_hooks.exporters import LoraExporter, exporter_for
from xhf_hooks.exporters.base import ExportRequest
from xhf_hooks.sources import source_for
from xhf_hooks.xtuner import ShardedMoeExporter

REWARD_TOKEN_ID = 130

if_xtuner_has_experts = pytest.mark.skipif(
    find_spec('xtuner.model.transformers_models') is None, reason='this XTuner has no sharded experts'
)


def move(model: nn.Module) -> nn.Module:
    """As training does: every trained tensor."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += NOISE_STD * torch.randn(parameter.shape)
    return model


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        pass


def to_hf(model: nn.Module, folder: Path) -> None:
    """XTuner's own export, which takes the model apart: call it last."""
    import xtuner.model.reward as reward

    folder.mkdir()
    with mock.patch.object(reward.BUILDER, 'build', lambda config: Tokenizer()):
        cfg = SimpleNamespace(tokenizer=None, reward_token_id=REWARD_TOKEN_ID)
        model.to_hf(cfg, str(folder), fp32=True, save_pretrained_kwargs={})


@pytest.mark.skipif(find_spec('xtuner.model.reward') is None, reason='this XTuner has no reward model')
def test_internlm2_reward_model(tmp_path):
    from xtuner.model.reward import RewardModel

    model = move(RewardModel(llm=internlm2()))
    save_folder(model, tmp_path / 'hf_model', run_config=dict(reward_token_id=REWARD_TOKEN_ID))
    files = {path.name for path in (tmp_path / 'hf_model').iterdir()}
    assert {'configuration_internlm2.py', 'modeling_internlm2.py'} <= files
    to_hf(model, tmp_path / 'expected')
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'hf_model')
    config, expected = (json.loads((tmp_path / n / 'config.json').read_text()) for n in ('hf_model', 'expected'))
    for key in ('architectures', 'auto_map', 'reward_token_id', 'vocab_size', 'hidden_size'):
        assert config[key] == expected[key], key
    assert config['auto_map']['AutoModel'] == 'modeling_internlm2.InternLM2ForRewardModel'
    loaded, report = AutoModel.from_pretrained(tmp_path / 'hf_model', trust_remote_code=True, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(loaded.v_head.weight, model.v_head.weight)


@pytest.fixture
def one_rank(tmp_path):
    """XTuner's un-fusing asks for its rank."""
    dist.init_process_group('gloo', init_method=f'file://{tmp_path / "store"}', rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@if_xtuner_has_experts
@pytest.mark.parametrize(('family', 'n_in_shard'), [(mixtral, 2), (deepseek_v2, 2), (deepseek_v2, 4)])
def test_sharded_experts_are_unfused_as_xtuner_does(family, n_in_shard, one_rank, tmp_path):
    from xtuner.utils import get_origin_state_dict

    torch.manual_seed(0)
    llm = family(n_in_shard)
    for parameter in llm.parameters():  # shards are made without values
        parameter.data = NOISE_STD * torch.randn(parameter.shape)
    model = around(llm=llm)
    assert type(exporter_for(model, None)) is ShardedMoeExporter
    plan, committed = save_folder(model, tmp_path / 'hf_model', writer='gather')
    (tmp_path / 'expected').mkdir()
    origin = get_origin_state_dict(dict(llm.state_dict()), llm)
    save_file(
        {name: tensor.contiguous() for name, tensor in origin.items()}, tmp_path / 'expected' / 'model.safetensors'
    )
    assert_same_folder_tensors(tmp_path / 'expected', committed.path)
    assert max(len(group.reads) for bucket in plan.buckets for group in bucket) == 1
    in_slices, _ = save_folder(model, tmp_path / 'slices')
    assert not in_slices.buckets
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'slices')
    config = json.loads((committed.path / 'config.json').read_text())
    assert not {'moe_implementation', 'expert_in_one_shard'} & set(config)
    assert config['architectures'] == [type(llm).__name__]


@if_xtuner_has_experts
def test_adapter_of_sharded_experts():
    model = adapt(deepseek_v2(2), target_modules=['q_a_proj'])
    exporter = exporter_for(model, None)
    assert type(exporter) is LoraExporter
    assert all('lora_' in entry.hf_name for entry in exporter.export(ExportRequest(source_for(model).specs())).entries)
    assert 'sharded experts is not supported; set lora to' in refusal(model, 'merge')
