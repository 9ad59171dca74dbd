"""A model partitioned by DeepSpeed ZeRO-3: every rank holds a slice of every parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from xhf_hooks.errors import RankLostError, TensorError
from xhf_hooks.registry import SOURCES
from xhf_hooks.sources.base import Slice
from xhf_hooks.sources.module import ModuleSource, rank_and_world_size, share


@SOURCES.register_module()
class Zero3Source(ModuleSource):
    """Gathers partitions under ``deepspeed.zero.GatheredParameters``, wherever they are offloaded to.

    Between iterations a partitioned parameter has the shape ``[0]``; its full shape is ``ds_shape`` and
    its identity ``ds_id`` (DeepSpeed ``runtime/zero/partition_parameters.py``). Buffers are never
    partitioned. Needs no ``stage3_gather_16bit_weights_on_model_save``.
    """

    memory_factor = 4  # measured by tools/bench.py

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return any(_is_partitioned(parameter) for parameter in model.parameters())

    def sliceable(self, masters: bool) -> set[str]:
        """What is in memory here, and spread over all ranks."""
        return {name for name, tensor in self._tensors.items() if self._is_sliceable(tensor, masters)}

    def _is_sliceable(self, tensor: torch.Tensor, masters: bool) -> bool:
        import torch.distributed as dist
        from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

        if not _is_partitioned(tensor):
            return True
        if dist.get_world_size(tensor.ds_process_group) != rank_and_world_size()[1]:
            return False
        if masters and self._has_master(tensor):
            return not tensor._z3_optimizer.swap_optimizer
        return tensor.ds_tensor.final_location != OffloadDeviceEnum.nvme

    def own_slice(self, name: str, masters: bool) -> Slice:
        tensor = self._tensors[name]
        if not _is_partitioned(tensor):
            return super().own_slice(name, masters)
        rank, world_size = rank_and_world_size()
        start, end = share(tensor.ds_numel, rank, world_size)
        partition = tensor.ds_tensor.data
        if masters and self._has_master(tensor):
            from deepspeed.utils import safe_get_local_fp32_param

            partition = safe_get_local_fp32_param(tensor)
        each = share(tensor.ds_numel, 0, world_size)[1]
        if partition.numel() != each:  # padded at its end where the parameter ends before
            raise TensorError(
                f'{name}: expected a partition of {each} elements on rank {rank}, found {partition.numel()}'
            )
        return Slice(start, partition.reshape(-1)[: end - start])

    @contextmanager
    def opened(self) -> Iterator[None]:
        """As DeepSpeed's own checkpoint code: drop what is gathered for training, restore it afterwards.

        Source: ``checkpoint_event_prologue`` and ``_epilogue`` in ``runtime/zero/stage3.py``, called around
        ``_zero3_consolidated_16bit_state_dict`` (``runtime/engine.py``).
        """
        optimizer = self._optimizer()
        if optimizer is None:
            yield
            return
        optimizer.checkpoint_event_prologue()
        is_complete = True
        try:
            yield
        except RankLostError:
            is_complete = False  # and what follows would wait for that rank
            raise
        finally:
            if is_complete:
                optimizer.checkpoint_event_epilogue()
                _wait_until_arrived(optimizer.persistent_parameters)  # training goes on with them

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], masters: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        import deepspeed
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        tensors = {name: self._tensors[name] for name in names}
        from_master = {n: t for n, t in tensors.items() if masters and self._has_master(t)}
        others = {n: t for n, t in tensors.items() if n not in from_master}
        # What is whole already (a persistent parameter of a model without optimizer) must stay so:
        # GatheredParameters would partition it on leaving.
        partitioned = {
            n: t for n, t in others.items() if _is_partitioned(t) and t.ds_status != ZeroParamStatus.AVAILABLE
        }
        read = {n: t.data for n, t in others.items() if n in wanted and n not in partitioned}
        with deepspeed.zero.GatheredParameters(list(partitioned.values())):
            _wait_until_arrived(partitioned.values())
            read.update((n, t.data) for n, t in partitioned.items() if n in wanted)
            yield {**read, **self._masters(from_master, wanted)}

    def _optimizer(self) -> Any | None:
        return next((t._z3_optimizer for t in self._tensors.values() if hasattr(t, '_z3_optimizer')), None)

    def _full_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.ds_shape) if _is_partitioned(tensor) else tuple(tensor.shape)

    def _has_master(self, tensor: torch.Tensor) -> bool:
        trained = hasattr(tensor, '_z3_optimizer') and tensor.requires_grad
        return trained and tensor.dtype in (torch.float16, torch.bfloat16)


def _wait_until_arrived(partitioned: Iterable[torch.Tensor]) -> None:
    """Wait for all that DeepSpeed gathers of these. Runs on: all ranks.

    It starts an asynchronous all-gather for each parameter, and waits for the last of them only
    (``_allgather_params_coalesced`` in ``runtime/zero/partition_parameters.py``). An accelerator's stream keeps their
    order; gloo's threads do not, but its barrier waits for all that was begun before.
    """
    import torch.distributed as dist

    for group in dict.fromkeys(tensor.ds_process_group for tensor in partitioned):
        if dist.get_backend(group) == dist.Backend.GLOO:
            dist.barrier(group)


def _is_partitioned(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, 'ds_id')
