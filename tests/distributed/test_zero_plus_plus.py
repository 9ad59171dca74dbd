"""Weights kept in other ways: in groups of ranks (hpZ of ZeRO++, MiCS), and frozen ones in 8 or 4 bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.engines import names_read, save_folder, train_one_step, zero_engine
from tests.helpers.runs.zero_config import zero_config

N_RANKS, GROUP_SIZE = 4, 2
WAYS = {
    'stream': dict(),
    'gather': dict(writer='gather'),
    'masters, positional': dict(dtype='float32', writer='positional'),
}


def build_model(lora: bool = False) -> Any:
    import torch

    from tests.helpers.models.zoo.llamas import llama

    model = llama(vocab_size=256, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_('layers.1' in name)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, task_type='CAUSAL_LM'))
    return model.to(torch.bfloat16)


def save_all(model: Any, folder: Path) -> dict[str, bool]:
    """Which ways gather something."""
    plans = {way: save_folder(model, folder / way, **how)[0] for way, how in WAYS.items()}
    return {way: bool(plan.gathered) for way, plan in plans.items()}


def save_hpz(root: Path) -> dict[str, set[bool]]:
    """Whether parameters have a second copy within their group, before saves and after."""
    for name, options in {'plain': {}, 'hpz': dict(zero_hpz_partition_size=GROUP_SIZE)}.items():
        engine = zero_engine(build_model(), 3, **options)
        save_all(engine.module, root / name / 'untrained')
        train_one_step(engine)
        seen = {'before': copies(engine)}
        save_all(engine.module, root / name)
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
    import deepspeed

    model = build_model()
    zero = dict(mics_shard_size=GROUP_SIZE)
    deepspeed.zero.MiCS_Init(module=model, config_dict_or_path=zero_config(3, **zero))
    engine = zero_engine(model, 3, **zero)
    gathers = save_all(engine.module, root / 'mics')
    numel = engine.module.lm_head.weight.ds_tensor.numel()
    engine.destroy()
    return numel, gathers


def save_quantized(root: Path) -> dict[str, str]:
    """What each way to save says, where DeepSpeed has quantized frozen weights; it does so by a CUDA operator."""
    from xhf_hooks.errors import AgreedError

    engine = zero_engine(build_model(lora=True), 3)
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            parameter.ds_tensor.ds_quant_scale = 1.0
    said = {}
    for lora in ('adapter', 'merge'):
        try:
            save_folder(engine.module, root / 'quantized' / lora, lora=lora)
            said[lora] = 'saved'
        except AgreedError as error:
            said[lora] = str(error)
    engine.destroy()
    return said


def save_qlora(root: Path) -> tuple[set[str], set[str], str]:
    """An adapter on a base that bitsandbytes quantized to 4 bits, as XTuner's QLoRA configs have it, at ZeRO-2.

    Returns:
        Names that were read, and that were trained; why it is not merged.
    """
    import torch
    import torch.distributed as dist
    import transformers
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from torch import nn

    from xhf_hooks.errors import AgreedError

    nf4 = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type='nf4',
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    auto = transformers.AutoModelForCausalLM
    base = auto.from_pretrained(root / 'base', quantization_config=nf4, torch_dtype=torch.bfloat16)
    model = nn.Module()  # in the shape of XTuner's SupervisedFinetune
    llm = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    model.llm = get_peft_model(llm, LoraConfig(r=3, target_modules=['q_proj', 'v_proj'], task_type='CAUSAL_LM'))
    engine = zero_engine(model, 2)
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        engine.backward(model.llm(input_ids=tokens, labels=tokens).loss)
        engine.step()
    plan, _ = save_folder(engine.module, root / 'qlora')
    with pytest.raises(AgreedError) as caught:
        save_folder(engine.module, root / 'merged', lora='both')
    if dist.get_rank() == 0:
        model.llm.save_pretrained(root / 'qlora_expected')
    trained = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    return names_read(plan), trained, str(caught.value)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('zero_plus_plus')
    build_model().save_pretrained(root / 'base')
    scenarios = {'hpz': save_hpz, 'mics': save_mics, 'quantized': save_quantized, 'qlora': save_qlora}
    return root, run_scenarios({name: partial(save, root) for name, save in scenarios.items()}, N_RANKS)


def weights(folder: Path) -> bytes:
    return (folder / 'model.safetensors').read_bytes()


def test_hpz_gives_the_same_files_and_training_goes_on_as_without_saves(saved):
    root, results = saved
    for seen in check(results, 'hpz'):
        assert seen == {'before': {False}, 'after': {False}}  # the next forward pass makes the copies
    for way in (*WAYS, 'after the next step'):
        assert weights(root / 'hpz' / way) == weights(root / 'plain' / way), way


def test_mics_gives_the_same_files(saved):
    root, results = saved
    check(results, 'hpz')
    gathers = {way: way == 'gather' for way in WAYS}
    assert check(results, 'mics') == [(256 * 64 // GROUP_SIZE, gathers)] * N_RANKS
    for way in WAYS:
        assert weights(root / 'mics' / way) == weights(root / 'plain' / 'untrained' / way), way


def test_frozen_weights_in_8_bits_are_refused_and_an_adapter_is_saved_beside_them(saved):
    root, results = saved
    for said in check(results, 'quantized'):
        assert "stage 'plan' failed" in said['merge'] and 'zero_quantized_nontrainable_weights' in said['merge']
        assert said['adapter'] == 'saved'
    assert (root / 'quantized' / 'adapter' / 'adapter_model.safetensors').exists()


def test_qlora_reads_only_the_adapter_and_refuses_to_merge(saved):
    root, results = saved
    read, trained, refusal = check(results, 'qlora')[0]
    assert read == trained
    tensors = folder_tensors(root / 'qlora')
    assert len(tensors) == len(trained)
    assert all(tensor.any() for tensor in tensors.values()), 'B begins as zero: it was trained'
    assert 'is quantized (bitsandbytes), and such weights can neither be exported nor merged' in refusal
    assert "set lora to 'adapter'" in refusal and not (root / 'merged').exists()
    assert_same_folder_tensors(root / 'qlora_expected', root / 'qlora')
