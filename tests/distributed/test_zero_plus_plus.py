"""Weights kept in other ways: in groups of ranks (hpZ of ZeRO++, MiCS), and frozen ones in 8 or 4 bits."""

from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from tests.helpers.models.zoo.llamas import llama
from tests.helpers.ranks.scenarios import check, error_of, run_scenarios
from tests.helpers.runs.engines import save_folder, train_one_step, zero_engine
from tests.helpers.runs.zero_config import zero_config

N_RANKS, GROUP_SIZE = 4, 2
WAYS = {
    'stream': dict(),
    'gather': dict(writer='gather'),
    'masters, positional': dict(dtype='float32', writer='positional'),
}


def build_model(lora: bool = False) -> Any:
    model = llama(vocab_size=256, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_('layers.1' in name)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, task_type='CAUSAL_LM'))
    return model.to(torch.bfloat16)


def save_ways(model: Any, folder: Path, *ways: str) -> dict[str, bool]:
    """Which ways gather something."""
    plans = {way: save_folder(model, folder / way, **WAYS[way])[0] for way in ways}
    return {way: bool(plan.gathered) for way, plan in plans.items()}


def save_hpz(root: Path) -> dict[str, set[bool]]:
    """Whether parameters have a second copy within their group, before saves and after."""
    for name, options in {'plain': {}, 'hpz': dict(zero_hpz_partition_size=GROUP_SIZE)}.items():
        engine = zero_engine(build_model(), 3, **options)
        # Those of the plain engine are also what MiCS must give
        save_ways(engine.module, root / name / 'untrained', *(WAYS if name == 'plain' else ['stream']))
        train_one_step(engine)
        seen = {'before': copies(engine)}
        save_ways(engine.module, root / name, *WAYS)
        seen['after'] = copies(engine)
        train_one_step(engine)
        save_folder(engine.module, root / name / 'after the next step')
        engine.destroy()
    return seen


def copies(engine: Any) -> set[bool]:
    return {p.ds_secondary_tensor is not None for p in engine.module.parameters() if p.requires_grad}


def save_mics(root: Path) -> tuple[int, dict[str, bool]]:
    """Number of elements of a partition, and which ways gather.

    Nothing is trained: for that, gloo lacks a collective that MiCS needs.
    """
    model = build_model()
    zero = dict(mics_shard_size=GROUP_SIZE)
    deepspeed.zero.MiCS_Init(module=model, config_dict_or_path=zero_config(3, **zero))
    engine = zero_engine(model, 3, **zero)
    gathers = save_ways(engine.module, root / 'mics', *WAYS)
    numel = engine.module.lm_head.weight.ds_tensor.numel()
    engine.destroy()
    return numel, gathers


def save_quantized(root: Path) -> dict[str, str]:
    """What each way to save says, where DeepSpeed has quantized frozen weights; it does so by a CUDA operator."""
    engine = zero_engine(build_model(lora=True), 3)
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            parameter.ds_tensor.ds_quant_scale = 1.0
    folder = root / 'quantized'
    said = {lora: error_of(save_folder, engine.module, folder / lora, lora=lora) for lora in ('adapter', 'merge')}
    engine.destroy()
    return said


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('zero_plus_plus')
    scenarios = {'hpz': save_hpz, 'mics': save_mics, 'quantized': save_quantized}
    return run_scenarios({name: partial(save, root) for name, save in scenarios.items()}, N_RANKS, root=root)


def weights(folder: Path) -> bytes:
    return (folder / 'model.safetensors').read_bytes()


def test_hpz_gives_the_same_files_and_training_goes_on_as_without_saves(saved):
    for seen in check(saved, 'hpz'):
        assert seen == {'before': {False}, 'after': {False}}  # the next forward pass makes the copies
    for way in ('untrained/stream', *WAYS, 'after the next step'):
        assert weights(saved.root / 'hpz' / way) == weights(saved.root / 'plain' / way), way


def test_mics_gives_the_same_files(saved):
    check(saved, 'hpz')
    gathers = {way: way == 'gather' for way in WAYS}
    assert check(saved, 'mics') == [(256 * 64 // GROUP_SIZE, gathers)] * N_RANKS
    for way in WAYS:
        assert weights(saved.root / 'mics' / way) == weights(saved.root / 'plain' / 'untrained' / way), way


def test_frozen_weights_in_8_bits_are_refused_and_an_adapter_is_saved_beside_them(saved):
    for said in check(saved, 'quantized'):
        assert "stage 'plan' failed" in said['merge'] and 'zero_quantized_nontrainable_weights' in said['merge']
        assert said['adapter'] == ''
    assert (saved.root / 'quantized' / 'adapter' / 'adapter_model.safetensors').exists()
