"""XTuner's fused experts go out one by one, under the official names. tests/e2e/xtuner_stack has XTuner's own model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.adapted import adapt, around, refusal
from tests.helpers.compare import assert_loads_clean, assert_same_folder_tensors, folder_tensors
from tests.helpers.config_fields import config_fields
from tests.helpers.engines import save_folder
from tests.helpers.zoo import build
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters import LoraExporter, ShardedMoeExporter, exporter_for
from xhf_hooks.sources import source_for

IN_ONE_SHARD = 2


class Shard(nn.Module):
    """As XTuner's ``ExpertShard`` holds them."""

    def __init__(self, gates: list, ups: list, downs: list) -> None:
        super().__init__()
        self.w1w3 = nn.Parameter(torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)]))
        self.w2 = nn.Parameter(torch.stack(downs))


def sharded(folder) -> nn.Module:
    """The Mixtral of ``folder``, its experts in shards of two, as a class of XTuner's name and config."""
    import transformers

    class MixtralConfig(transformers.MixtralConfig):
        pass

    class MixtralForCausalLM(transformers.MixtralForCausalLM):
        config_class = MixtralConfig

    official = transformers.MixtralForCausalLM.from_pretrained(folder)
    weights = folder_tensors(folder)
    options = official.config.to_dict() | dict(moe_implementation='shard', expert_in_one_shard=IN_ONE_SHARD)
    model = MixtralForCausalLM(MixtralConfig.from_dict(options))
    model.load_state_dict(official.state_dict())
    for index, layer in enumerate(model.model.layers):
        (path,) = {
            name.split('.')[3] for name in weights if name.startswith(f'model.layers.{index}.') and 'gate' in name
        }
        names = [f'model.layers.{index}.{path}.experts.{{}}.{part}.weight' for part in ('w1', 'w3', 'w2')]
        parts = [[weights[name.format(e)] for e in range(4)] for name in names]
        block = nn.Module()
        block.gate = nn.Linear(40, 4, bias=False)
        block.gate.weight.data = weights[f'model.layers.{index}.{path}.gate.weight']
        block.experts = nn.ModuleList(Shard(*(part[i : i + IN_ONE_SHARD] for part in parts)) for i in (0, 2))
        for old in ('mlp', 'block_sparse_moe'):
            layer._modules.pop(old, None)
        layer.block_sparse_moe = block  # the name of its checkpoints, which transformers 5 renames in memory
    return model


@pytest.fixture
def official(tmp_path):
    import transformers

    config = build('mixtral').config
    config.num_local_experts = 4
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / 'official')
    return tmp_path / 'official'


@pytest.mark.parametrize('dtype', [None, 'bfloat16'])
def test_folder_is_the_official_one(official, tmp_path, dtype):
    from transformers import MixtralForCausalLM

    model = sharded(official)
    model.config.use_cache = True
    plan, committed = save_folder(around(llm=model), tmp_path / 'hf_model', dtype=dtype)
    config, expected = config_fields(committed.path, official), config_fields(official)
    if dtype is None:
        assert_same_folder_tensors(official, committed.path)
        config.pop('_name_or_path', None)  # transformers 4 writes where a model was loaded from
        assert config == expected
    else:
        found = folder_tensors(committed.path)
        assert all(torch.equal(found[n], t.bfloat16()) for n, t in folder_tensors(official).items())
    assert_loads_clean(committed.path, MixtralForCausalLM)
    runs: dict[str, set[str]] = {}
    for portion in (portion for at_once in plan.rounds for portion in at_once.portions):
        runs.setdefault(portion.read.name, set()).add(portion.placement.hf_name)
    assert sum(len(names) > 1 for names in runs.values()) == 2 * 2 * 2  # layers, shards, tensors


def test_adapter_of_sharded_experts(official):
    model = adapt(sharded(official))
    exporter = exporter_for(model, None)
    assert type(exporter) is LoraExporter
    assert all('lora_' in entry.hf_name for entry in exporter.entries(source_for(model).specs(), None))
    assert 'sharded experts is not supported; set lora to' in refusal(model, 'merge')


def test_another_sharded_model_is_refused(official):
    model = sharded(official)
    type(model).__name__ = 'OtherMoeForCausalLM'
    with pytest.raises(ModelError, match='OtherMoeForCausalLM has sharded experts; supported are'):
        exporter_for(model, None)


def test_official_model_is_not_taken_for_a_sharded_one():
    assert not ShardedMoeExporter.accepts(build('mixtral'), None)
