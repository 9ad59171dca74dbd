"""Engines whose weights cannot be read as they are trained, recognized by what DeepSpeed sets on them."""

from types import SimpleNamespace

import pytest
from torch import nn

from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.sources import Zero3Source, source_for
from xhf_hooks.sources.master_fragments import refuse_unreadable_fp32_masters


@pytest.mark.parametrize('name', ['round_robin_gradients', 'zenflow'])
def test_masters(name):
    optimizer = SimpleNamespace(**{name: True})
    for engine in (SimpleNamespace(**{name: True}), SimpleNamespace(**{name: False}, optimizer=optimizer)):
        with pytest.raises(OptionError, match=f"no 'float32', or no {name} in DeepSpeed's config"):
            refuse_unreadable_fp32_masters(engine)
    refuse_unreadable_fp32_masters(SimpleNamespace(**{name: False}))


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
