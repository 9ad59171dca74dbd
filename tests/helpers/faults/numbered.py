"""Models all of whose weights are the number of the save: a folder shows which it is, and whether it mixes saves."""

import deepspeed
import torch
from torch import nn

from tests.helpers.models.zoo.llamas import llama
from tests.helpers.runs.zero_config import zero_config

NAME = 'hf_model'


def tiny_model(zero3: bool) -> nn.Module:
    """A model of fourteen tensors; in bfloat16 at ZeRO-3."""
    if not zero3:
        return llama()
    with deepspeed.zero.Init(config_dict_or_path=zero_config(3), dtype=torch.bfloat16):
        return llama()


def fill(model: nn.Module, number: int) -> None:
    """Set every weight, or this rank's part of it, to one value."""
    with torch.no_grad():
        for parameter in model.parameters():
            getattr(parameter, 'ds_tensor', parameter).fill_(number)
