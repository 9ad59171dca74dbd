"""Engines whose weights cannot be read as they are trained, recognized by what DeepSpeed sets on them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.sources import Zero3Source, source_for
from xhf_hooks.sources.master_fragments import refuse_unnamed_fp32_masters, refuse_unreadable_fp32_masters


@pytest.mark.parametrize('name', ['round_robin_gradients', 'zenflow'])
def test_masters(name):
    optimizer = SimpleNamespace(**{name: True})
    for engine in (SimpleNamespace(**{name: True}), SimpleNamespace(**{name: False}, optimizer=optimizer)):
        with pytest.raises(OptionError, match=f"None, or no {name} in DeepSpeed's config"):
            refuse_unreadable_fp32_masters(engine)
    refuse_unreadable_fp32_masters(SimpleNamespace(**{name: False}))


@pytest.mark.parametrize('name', ['fp32_groups', 'fp32_groups_flat'])
def test_masters_of_stage_0(name):
    """DeepSpeed's own classes, as the engine has them or Trainer passes them in a wrapper."""
    FP16_Optimizer = type('FP16_Optimizer', (), {name: []})
    for given in (FP16_Optimizer(), SimpleNamespace(optimizer=FP16_Optimizer())):
        with pytest.raises(OptionError) as caught:
            refuse_unnamed_fp32_masters(given)
        assert str(caught.value) == (
            "option dtype: expected ZeRO stage 1, 2 or 3 for 'float32' (zero_optimization in DeepSpeed's config; at "
            'stage 0, FP16_Optimizer does not show which parameter each fp32 master weight belongs to), found 0'
        )
    refuse_unnamed_fp32_masters(SimpleNamespace(optimizer=None))


def with_masters(masters: dict[str, torch.Tensor]) -> nn.Module:
    """A 16-bit model whose parameters DeepSpeed has linked to these masters."""
    model = nn.Linear(40, 30, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        master = masters.get(name, parameter.detach().float()).reshape(-1)
        address = SimpleNamespace(start=7, numel=parameter.numel() - 7)
        parameter._hp_mapping = SimpleNamespace(
            lp_fragment_address=address, get_hp_fragment=lambda master=master: master[7:]
        )
    return model


@pytest.mark.parametrize(
    'other', [lambda master: master.flip(0), lambda master: master + 0.1, lambda master: master[1:]]
)
def test_a_master_of_another_parameter_is_refused_whoever_passed_the_model(other):
    """By its values alone; one that differs from the weights by rounding is right."""
    exact = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    for masters, is_right in ((exact, True), (other(exact), False)):
        model = with_masters({'weight': masters})
        model.weight.data.copy_(exact)
        source = source_for(model)
        specs = [spec.of_master() for spec in source.specs() if spec.has_master]
        assert [spec.name for spec in specs] == ['weight', 'bias']
        if is_right:
            source.require_masters_match_weights(specs)
            continue
        with pytest.raises(ModelError, match=r'^weight: expected an fp32 master that rounds .* \(in 1 of 2 tensors'):
            source.require_masters_match_weights(specs)


def test_masters_in_16_bits_are_none():
    model = with_masters({'weight': torch.zeros(30, 40, dtype=torch.bfloat16)})
    assert [(spec.has_master, spec.master_lost) for spec in source_for(model).specs()] == [(False, True)] * 2


def test_zenflow_at_zero_3():
    model = nn.Linear(2, 3)
    model.weight._z3_optimizer = SimpleNamespace(zenflow=True)
    with pytest.raises(ModelError, match='zenflow'):
        Zero3Source(model).specs()
    model.weight._z3_optimizer.zenflow = False
    assert [spec.name for spec in Zero3Source(model).specs()] == ['weight', 'bias']


@pytest.mark.parametrize('of_deepspeed', ['Conv_LinearALlreduce', 'NewLayer', None])
def test_autotp_layers_that_are_not_gathered(of_deepspeed):
    """Others than those that are known to gather what they split; and parameters without DeepSpeed's description."""

    def gather_params(self, parameters):
        raise AssertionError

    layer = type(of_deepspeed or 'LinearLayer', (), {'gather_params': gather_params})()
    model = nn.Linear(2, 3)
    model.weight.ds_is_replaced_module, model.weight.gather_params = True, layer.gather_params
    if of_deepspeed is not None:
        model.weight.ds_autotp_universal_checkpoint_meta = {'original_shape': (6, 2)}
    with pytest.raises(ModelError, match=r'weight: split by AutoTP.*Remove autotp_size'):
        source_for(model)


@pytest.mark.parametrize('plan', ['colwise', 'local_packed_rowwise'])
def test_tensor_parallelism_of_transformers_without_dtensors_in_order(plan):
    model = nn.Sequential(nn.Linear(2, 3))
    model._tp_size, model[0]._hf_tp_plan = 2, plan
    if 'packed' in plan:
        model[0].weight.placements = ()
    with pytest.raises(ModelError, match=r'Sequential: expected DTensors.*transformers'):
        source_for(model)
