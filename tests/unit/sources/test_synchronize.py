"""Before a save, every device of the model is waited for: streams of the user may still write to the weights."""

from __future__ import annotations

from unittest import mock

import torch
from torch import nn

from xhf_hooks.sources import Source


class OnDevice(nn.Parameter):
    """A parameter on the CPU that says to be on another device, for want of one."""

    device = property(lambda self: torch.device('cuda', 1))


def test_the_devices_of_the_model_are_waited_for_and_no_other():
    model = nn.Linear(2, 3)
    with mock.patch('torch.cuda.synchronize') as synchronize:
        Source(model).synchronize()
        assert not synchronize.called
        model.weight = OnDevice(model.weight.data)
        Source(model).synchronize()
    synchronize.assert_called_once_with(torch.device('cuda', 1))
