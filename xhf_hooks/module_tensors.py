"""The tensors of a module by name, as ``nn.Module.state_dict`` orders them."""

from __future__ import annotations

import torch
from torch import nn


def module_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, tied ones under each of their names.

    An overridden ``state_dict()`` is not asked: what a checkpoint format leaves out is another question
    than what there is.
    """
    found: list[tuple[str, torch.Tensor]] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = list(module._parameters.items())
        own += [(n, b) for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set]
        found += [(f'{prefix}.{n}' if prefix else n, t) for n, t in own if t is not None]
    return found
