"""LoRA under DeepSpeed and FSDP2: adapter and merged model are those of the whole model."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from tests.helpers.checks.compare import assert_loads_clean, assert_same_folder_tensors, folder_tensors
from tests.helpers.models.adapted import (
    EXPERTS,
    adapt,
    assert_rounded_once,
    can_be_made,
    is_known_to_peft,
    merged_by_peft,
)
from tests.helpers.models.zoo import build
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.engines import names_read, save_folder, zero_engine
from tests.helpers.runs.fsdp_runs import shard

ENGINES: dict[str, dict[str, Any]] = {
    'zero2': dict(stage=2),
    'zero3': dict(stage=3),
    'zero3_fp32': dict(stage=3, bf16=False),
    'fsdp2_fp32': {},
}
#: Name: family, LoraConfig options.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    'plain': ('llama', dict(target_modules='all-linear')),
    'dora_modules_to_save': ('llama', dict(use_dora=True, use_rslora=True, modules_to_save=['lm_head'])),
    'experts': ('mixtral', dict(target_parameters=EXPERTS)),
    'tokens': ('llama', dict(trainable_token_indices={'embed_tokens': [5, 9, 130]})),  # peft computes the embedding
}
CASES = ['plain-zero2', 'plain-zero3', 'dora_modules_to_save-zero3_fp32']
EXPERT_CASES = ['experts-zero3_fp32', 'experts-fsdp2_fp32'] if is_known_to_peft('expert_parameters') else []
UNMERGEABLE = ['tokens-zero3', 'tokens-fsdp2_fp32'] if can_be_made('llama', **ADAPTERS['tokens'][1]) else []


def build_model(root: Path, adapter: str, engine_name: str) -> Any:
    """XTuner's shape: the PeftModel is ``llm`` of the trained model."""
    family, lora = ADAPTERS[adapter]
    dtype = torch.float32 if engine_name.endswith('fp32') else torch.bfloat16
    model = nn.Module()
    model.llm = adapt(AutoModelForCausalLM.from_pretrained(root / family, torch_dtype=dtype), dtype, **lora)
    return model


def save_case(adapter: str, engine_name: str, root: Path) -> tuple[set[str], set[str]]:
    """The names that the adapter's plan reads, and those of its tensors. Runs on: all ranks."""
    model = build_model(root, adapter, engine_name)
    folder = root / f'{adapter}-{engine_name}'
    if dist.get_rank() == 0:
        model.llm.save_pretrained(folder / 'expected_adapter')
        if folder.name not in UNMERGEABLE:
            merged_by_peft(model.llm, folder / 'expected_merge')
            model.llm.double().merge_and_unload().save_pretrained(folder / 'exact_merge')
            model = build_model(root, adapter, engine_name)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    engine = None if engine_name.startswith('fsdp2') else zero_engine(model, **ENGINES[engine_name])
    model = shard(model, 'fsdp2') if engine is None else engine.module
    plan, _ = save_folder(model, folder / 'adapter', lora='adapter')
    if folder.name not in UNMERGEABLE:
        save_folder(model, folder / 'both', lora='both')
    if engine is not None:
        engine.destroy()
    return names_read(plan), trained


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('lora')
    for family in ('llama', 'mixtral'):
        build(family).save_pretrained(root / family)
    scenarios = {case: partial(save_case, *case.split('-'), root) for case in (*CASES, *EXPERT_CASES, *UNMERGEABLE)}
    return run_scenarios(scenarios, 2, root=root)


@pytest.mark.parametrize('case', [*CASES, *EXPERT_CASES, *UNMERGEABLE])
def test_adapter_is_pefts_file(saved, case):
    read, trained = check(saved, case)[0]
    assert read == trained  # nothing of the base
    expected = saved.root / case / 'expected_adapter'
    for folder in ('adapter', *([] if case in UNMERGEABLE else ['both/adapter'])):
        found = saved.root / case / folder
        name = 'adapter_model.safetensors'
        assert (found / name).read_bytes() == (expected / name).read_bytes()
        cards = [(each / 'README.md').read_text().partition('\n---\n') for each in (found, expected)]
        assert cards[0][2] == cards[1][2] and 'library_name: peft' in cards[0][0]
        assert 'base_model' not in cards[0][0], 'the base is a folder of this machine'


@pytest.mark.parametrize('case', [*CASES, *EXPERT_CASES])
def test_merged_model(saved, case):
    merged = saved.folder(case) / 'both'
    assert_rounded_once(folder_tensors(merged), folder_tensors(saved.root / case / 'exact_merge'))
    if case.endswith('fp32'):
        assert_same_folder_tensors(saved.root / case / 'expected_merge', merged)
        assert_loads_clean(
            merged, transformers.MixtralForCausalLM if case in EXPERT_CASES else transformers.LlamaForCausalLM
        )


def test_same_file_at_every_stage(saved):
    for case in CASES[:2]:
        check(saved, case)
    for name in ('both/model.safetensors', 'adapter/adapter_model.safetensors'):
        assert len({(saved.root / case / name).read_bytes() for case in CASES[:2]}) == 1
