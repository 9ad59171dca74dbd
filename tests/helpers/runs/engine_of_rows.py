"""An engine that gives each rank a block of the rows of each parameter, and its source in docs/extending.md."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.checks.pages import code


def source_of_the_page() -> Any:
    """Register RowsSource."""
    names: dict[str, Any] = {}
    exec(code('class RowsSource', 'extending.md'), names)
    return names['RowsSource']


def partition(model: nn.Module, dim: int = 0) -> nn.Module:
    """Leave a block of the rows of each parameter on this rank, as the engine does; or of the columns."""
    for parameter in model.parameters():
        along = min(dim, parameter.dim() - 1)
        parameter.full_shape = parameter.shape
        blocks = parameter.detach().chunk(dist.get_world_size(), along)
        rank = dist.get_rank()
        block = blocks[rank] if rank < len(blocks) else parameter.detach().narrow(along, 0, 0)
        parameter.data = block.clone(memory_format=torch.contiguous_format)
    return model
