"""Reads what DeepSpeed ZeRO-3 keeps on NVMe directly from its swap files.

DeepSpeed's swappers are not suitable. The one for parameters has few buffers (``buffer_count``), and a save that needs
more would fail. The one for masters reads all states of a sub group for each of its parameters, and its pipelined form
returns none. A training step waits for its writes, so the files are complete between iterations. A file holds a
partition, or the flat masters of a sub group, from its first byte on (DeepSpeed ``runtime/swap_tensor/utils.py``,
``swap_out_tensors``).
"""

from __future__ import annotations

import os

import torch

from xhf_hooks.errors import TensorError


def read_swapped_partition(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's partition of a parameter that is on NVMe.

    Raises:
        OSError: The swap file cannot be read.
        TensorError: It is too short.
    """
    swapper = parameter.nvme_swapper
    return _read(swapper.get_path(parameter, must_exist=True), 0, parameter.ds_tensor.ds_numel, swapper.dtype)


def read_swapped_master(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's partition of a trained parameter's fp32 master; None if the master is in memory.

    Raises:
        OSError: The swap file cannot be read.
        TensorError: It is too short.
    """
    optimizer = parameter._z3_optimizer
    group, first, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
    if not optimizer._swappable_optimizer_subgroup(group):
        return None
    flat = optimizer.fp32_partitioned_groups_flat[group]
    master, *_ = optimizer.optimizer_swapper.swap_params_info[optimizer.get_param_id(flat)].get_swap_paths()
    return _read(master, first, numel, flat.dtype)


def _read(path: str | os.PathLike[str], first: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Read ``numel`` elements, beginning with element ``first``."""
    elements = torch.empty(numel, dtype=dtype)
    room = memoryview(elements.view(torch.uint8).numpy())
    with open(path, 'rb', buffering=0) as file:
        file.seek(first * dtype.itemsize)
        done = 0
        while done < len(room):
            n = file.readinto(room[done:])
            if not n:
                raise TensorError(f'{path}: expected {len(room)} bytes at {first * dtype.itemsize}, found {done}')
            done += n
    return elements
