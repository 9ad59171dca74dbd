"""A model partitioned by DeepSpeed ZeRO-3: every rank holds a slice of every parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from xhf_hooks.errors import ModelError, TensorError
from xhf_hooks.registry import SOURCES
from xhf_hooks.sources.base import Slice
from xhf_hooks.sources.module import ModuleSource, rank_and_world_size
from xhf_hooks.sources.zero3_swapped import read_swapped_master, read_swapped_partition


@SOURCES.register_module()
class Zero3Source(ModuleSource):
    """Reads partitions where they are, in memory or on NVMe, and gathers them without DeepSpeed.

    Between iterations a partitioned parameter has the shape ``[0]``; its full shape is ``ds_shape``, its identity
    ``ds_id``, and ``ds_tensor`` holds this rank's partition (DeepSpeed ``runtime/zero/partition_parameters.py``),
    which is what an optimizer step writes. Buffers are never partitioned. DeepSpeed's own gathering
    (``GatheredParameters``) is not used: it changes the state of parameters, takes no more of them from NVMe than it
    has buffers for, and one rank that fails in it leaves the others waiting.
    """

    memory_factor = 4  # measured by tools/bench.py

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return any(_is_partitioned(parameter) for parameter in model.parameters())

    def require_readable(self, names: Collection[str]) -> None:
        quantized = [name for name in names if _is_quantized(self._tensors[name])]
        if quantized:
            raise ModelError(
                f'DeepSpeed keeps {len(quantized)} frozen tensors in 8 bits ({quantized[0]} is the first), so a save '
                f'would not hold what was loaded. Set zero_quantized_nontrainable_weights to False, or save the '
                f"adapter alone (lora='adapter')"
            )

    def sliceable(self, masters: bool) -> set[str]:
        """What is spread over all ranks."""
        world_size = rank_and_world_size()[1]
        return {
            name
            for name, tensor in self._tensors.items()
            if not _is_partitioned(tensor) or dist.get_world_size(_partition_group(tensor)) == world_size
        }

    def own_slice(self, name: str, masters: bool) -> Slice:
        tensor = self._tensors[name]
        if not _is_partitioned(tensor):
            return super().own_slice(name, masters)
        partition = self._partition(name, masters)
        start = min(rank_and_world_size()[0] * partition.numel(), tensor.ds_numel)
        return Slice(start, partition[: tensor.ds_numel - start])  # padded at its end where the parameter ends before

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], masters: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        whole = {n: self._tensors[n].detach() for n in names if n in wanted and not _is_partitioned(self._tensors[n])}
        partitioned = [name for name in names if _is_partitioned(self._tensors[name])]
        yield {**whole, **self._gather(partitioned, wanted, masters)}

    def _gather(self, names: Sequence[str], wanted: Collection[str], masters: bool) -> dict[str, torch.Tensor]:
        """Whole tensors. A rank that cannot read its partition takes part all the same, and raises afterwards.

        Otherwise the others would wait for it inside of a collective.
        """
        if not names:
            return {}
        from deepspeed.accelerator import get_accelerator

        device = get_accelerator().current_device_name()
        found, on_their_way, error = {}, [], None
        for name in names:
            tensor = self._tensors[name]
            try:
                partition = self._partition(name, masters)
            except Exception as caught:
                error = caught if error is None else error
                dtype = torch.float32 if masters and self._has_master(tensor) else tensor.dtype
                partition = torch.zeros(tensor.ds_tensor.ds_numel, dtype=dtype)
            partition, group = partition.to(device), _partition_group(tensor)
            full = partition.new_empty(partition.numel() * dist.get_world_size(group))
            on_their_way.append(dist.all_gather_into_tensor(full, partition, group=group, async_op=True))
            if name in wanted:
                found[name] = full[: tensor.ds_numel].view(tensor.ds_shape)
        for work in on_their_way:
            work.wait()
        if error is not None:
            raise error
        return found

    def _partition(self, name: str, masters: bool) -> torch.Tensor:
        """This rank's elements, and padding. Without communication; may alias live memory."""
        from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

        tensor = self._tensors[name]
        expected = tensor.ds_tensor.ds_numel
        if masters and self._has_master(tensor):
            partition = read_swapped_master(tensor)
            if partition is None:
                from deepspeed.utils import safe_get_local_fp32_param

                partition = safe_get_local_fp32_param(tensor)
        elif tensor.ds_tensor.status is PartitionedParamStatus.AVAILABLE:
            partition = tensor.ds_tensor.data
        else:
            partition = read_swapped_partition(tensor)
        if partition.numel() != expected:
            raise TensorError(
                f'{name}: expected a partition of {expected} elements on rank {rank_and_world_size()[0]}, '
                f'found {partition.numel()}'
            )
        return partition.reshape(-1)

    def _full_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.ds_shape) if _is_partitioned(tensor) else tuple(tensor.shape)

    def _has_master(self, tensor: torch.Tensor) -> bool:
        trained = hasattr(tensor, '_z3_optimizer') and tensor.requires_grad
        return trained and tensor.dtype in (torch.float16, torch.bfloat16)


def _is_partitioned(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, 'ds_id')


def _is_quantized(tensor: torch.Tensor) -> bool:
    return _is_partitioned(tensor) and hasattr(tensor.ds_tensor, 'ds_quant_scale')


def _partition_group(tensor: torch.Tensor) -> dist.ProcessGroup:
    """The ranks that hold a parameter together; MiCS (DeepSpeed ``runtime/zero/mics.py``) has several such groups."""
    return tensor.comm.param_shard_group if hasattr(tensor, 'comm') else tensor.ds_process_group
