"""Engines whose weights cannot be read as they are trained, recognized by what DeepSpeed sets on them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.sources import Zero3Source
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
