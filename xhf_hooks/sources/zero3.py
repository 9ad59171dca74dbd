"""Models partitioned by DeepSpeed ZeRO-3: every rank holds a slice of every parameter."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from xhf_hooks.errors import ModelError, RankLostError, TensorError
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.model import modules_in, parameters_of
from xhf_hooks.planning.spread import Spread
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.base import LocalElements
from xhf_hooks.sources.whole_tensors import WholeTensorsSource


class Zero3Source(WholeTensorsSource):
    """Reads this rank's partitions, or gathers them with ``deepspeed.zero.GatheredParameters``, offloaded or not.

    Between iterations a partitioned parameter has the shape ``[0]``. ``ds_shape`` is its full shape, ``ds_id`` its
    identity, and ``ds_tensor`` this rank's partition (DeepSpeed ``runtime/zero/partition_parameters.py``), which the
    optimizer step updates. Buffers are never partitioned. ``stage3_gather_16bit_weights_on_model_save`` is not needed.
    """

    partitioned_by = 'ZeRO-3'
    memory_factor = 4  # peak memory of a gather, in buckets, as tools/bench.py measures it

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return any(map(_is_partitioned, parameters_of(modules_in(model))))

    def specs(self) -> list[TensorSpec]:
        if any(getattr(getattr(t, '_z3_optimizer', None), 'zenflow', False) is True for t in self.tensors.values()):
            raise ModelError(
                'with zenflow in its config, DeepSpeed keeps matrices transposed at ZeRO-3; remove it, or use ZeRO-2'
            )
        return super().specs()

    def require_readable(self, names: Collection[str]) -> None:
        partitions = ((name, getattr(self.tensors[name], 'ds_tensor', None)) for name in names)
        quantized = [name for name, partition in partitions if hasattr(partition, 'ds_quant_scale')]
        if quantized:
            raise ModelError(
                f'DeepSpeed keeps frozen weights in 8 bits ({len(quantized)} of them; the first is {quantized[0]}), so '
                f'the original values are lost. Set zero_quantized_nontrainable_weights to False, or save only the '
                f"adapter with lora='adapter'"
            )

    def spread_of(self, tensor: torch.Tensor) -> Spread | None:
        """Also of a parameter on NVMe: :meth:`_partition` reads its swap file."""
        if not _is_partitioned(tensor):
            return super().spread_of(tensor)
        return self.spread_in_group(tensor.ds_numel, _partition_group(tensor), tensor.ds_tensor.ds_numel)

    def local_elements(self, spec: TensorSpec) -> LocalElements:
        tensor = self.tensors[spec.name]
        if not _is_partitioned(tensor):
            return super().local_elements(spec)
        expected = self.local_range(tensor)
        # The last partitions of a parameter are padded
        return LocalElements(expected.start, self._partition(spec)[: len(expected)])

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Free what training has gathered, and restore it afterwards, as DeepSpeed's checkpoint code does.

        See ``checkpoint_event_prologue`` and ``_epilogue`` in ``runtime/zero/stage3.py``, called around
        ``_zero3_consolidated_16bit_state_dict`` (``runtime/engine.py``).
        """
        optimizer = next((t._z3_optimizer for t in self.tensors.values() if hasattr(t, '_z3_optimizer')), None)
        if optimizer is None:
            yield
            return
        optimizer.checkpoint_event_prologue()
        is_complete = True
        try:
            yield
        except RankLostError:
            is_complete = False  # restoring would wait for the lost rank
            raise
        finally:
            if is_complete:
                optimizer.checkpoint_event_epilogue()
                _wait_until_arrived(optimizer.persistent_parameters)  # training uses them next

    def gathered(self, specs: Sequence[TensorSpec], wanted: Collection[str]) -> dict[str, torch.Tensor]:
        import deepspeed
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        by_us = [spec for spec in specs if self._is_gathered_by_us(spec)]
        remaining = {spec.name: self.tensors[spec.name] for spec in specs if not self._is_gathered_by_us(spec)}
        # A parameter that is already whole (a persistent one of a model without optimizer) must stay whole:
        # GatheredParameters would partition it on exit
        partitioned = {
            n: t for n, t in remaining.items() if _is_partitioned(t) and t.ds_status != ZeroParamStatus.AVAILABLE
        }
        read = {n: t.data for n, t in remaining.items() if n in wanted and n not in partitioned}
        with deepspeed.zero.GatheredParameters(list(partitioned.values())):
            _wait_until_arrived(partitioned.values())
            # `t.data` stays when the parameter is freed. So the block ends here, and no rank waits for its disk in it:
            # with enable_sanity_checks its exit all-reduces, and the other ranks would wait there
            read.update((n, t.data) for n, t in partitioned.items() if n in wanted)
        return read | self._gather_partitions(by_us, wanted)

    def _is_gathered_by_us(self, spec: TensorSpec) -> bool:
        return spec.from_master or _is_on_nvme(self.tensors[spec.name])

    def _gather_partitions(self, specs: Sequence[TensorSpec], wanted: Collection[str]) -> dict[str, torch.Tensor]:
        """Fp32 masters, and parameters on NVMe, for which DeepSpeed may not have enough buffers.

        They are gathered with ``writer='gather'``, and where an output needs whole tensors, as merged ones do.

        A rank that cannot read its partition takes part anyway, and raises afterwards: otherwise the other ranks would
        wait for it in a collective. DeepSpeed's ``safe_get_full_fp32_param`` is not used, since it returns nothing for
        an optimizer that is swapped to NVMe in a pipeline.
        """
        from deepspeed.accelerator import get_accelerator

        device = get_accelerator().current_device_name()
        found: dict[str, torch.Tensor] = {}
        on_their_way = []
        error: Exception | None = None
        for spec in specs:
            tensor = self.tensors[spec.name]
            try:
                partition = self._partition(spec)
            except Exception as caught:  # of any type: this rank takes part in the gather, and raises afterwards
                error = caught if error is None else error
                partition = torch.zeros(tensor.ds_tensor.ds_numel, dtype=TORCH_DTYPES[spec.dtype], device='cpu')
            group, numel = _partition_group(tensor), partition.numel()
            full = torch.empty(numel * dist.get_world_size(group), dtype=partition.dtype, device=device)
            # Sent from its place in the result, so that no more memory is needed
            own = full[dist.get_rank(group) * numel :][:numel].copy_(partition)
            on_their_way.append(dist.all_gather_into_tensor(full, own, group=group, async_op=True))
            if spec.name in wanted:
                found[spec.name] = full[: tensor.ds_numel].view(tensor.ds_shape)
        for work in on_their_way:
            work.wait()
        if error is not None:
            raise error
        return found

    def _partition(self, spec: TensorSpec) -> torch.Tensor:
        """This rank's elements, with padding. Does not communicate; the result may alias live memory."""
        tensor = self.tensors[spec.name]
        expected = tensor.ds_tensor.ds_numel
        if spec.from_master:
            partition = _master(tensor)
        elif _is_on_nvme(tensor):
            swapper = tensor.nvme_swapper
            partition = _read(swapper.get_path(tensor, must_exist=True), 0, expected, swapper.dtype)
        else:
            partition = tensor.ds_tensor.data
        if partition.numel() != expected:
            raise TensorError(
                f'{spec.name}: expected a partition of {expected} elements on rank {self.rank}, '
                f'found {partition.numel()}'
            )
        return partition.reshape(-1)

    def weights_and_master(self, spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This rank's weights and fp32 master; None where it is not checked that they belong together.

        On NVMe they cannot be mixed up, since DeepSpeed finds both by the parameter's number, and reading takes long.
        """
        tensor = self.tensors[spec.name]
        optimizer = tensor._z3_optimizer
        group, _, _ = optimizer.grad_position[optimizer.get_param_id(tensor)]
        if _is_on_nvme(tensor) or optimizer._swappable_optimizer_subgroup(group):
            return None
        numel = len(self.local_range(tensor))  # without padding
        return tensor.ds_tensor.detach().reshape(-1)[:numel], _master(tensor).reshape(-1)[:numel]

    def full_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.ds_shape) if _is_partitioned(tensor) else tuple(tensor.shape)

    def has_master(self, tensor: torch.Tensor) -> bool:
        if not tensor.requires_grad or tensor.dtype not in (torch.float16, torch.bfloat16):
            return False
        # DeepSpeed gives its optimizer to all parameters. Of those that it does not train, the 16-bit weights are exact
        optimizer = getattr(tensor, '_z3_optimizer', None)
        if optimizer is None or optimizer.get_param_id(tensor) not in optimizer.grad_position:
            return False
        group, _, _ = optimizer.grad_position[optimizer.get_param_id(tensor)]
        # With bf16_master_weights_and_grads, masters are in 16 bits
        return bool(optimizer.fp32_partitioned_groups_flat[group].dtype == torch.float32)


def _master(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's partition of a trained parameter's fp32 master, from memory or NVMe."""
    optimizer = parameter._z3_optimizer
    group, first, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
    flat = optimizer.fp32_partitioned_groups_flat[group]
    if not optimizer._swappable_optimizer_subgroup(group):
        # Where it lives: safe_get_local_fp32_param copies an offloaded one to the device
        return flat.detach()[first : first + numel]
    path, *_ = optimizer.optimizer_swapper.swap_params_info[optimizer.get_param_id(flat)].get_swap_paths()
    return _read(path, first, numel, flat.dtype)


def _read(path: str | os.PathLike[str], first: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """``numel`` elements of a swap file, from element ``first`` on; fewer if it ends before."""
    found = np.fromfile(path, np.uint8, numel * dtype.itemsize, offset=first * dtype.itemsize)
    return torch.from_numpy(found).view(dtype)


def _wait_until_arrived(partitioned: Iterable[torch.Tensor]) -> None:
    """Wait until DeepSpeed has gathered all of these parameters. Runs on: all ranks.

    DeepSpeed starts an asynchronous all-gather for each parameter and waits only for the last one
    (``_allgather_params_coalesced`` in ``runtime/zero/partition_parameters.py``). An accelerator's stream finishes them
    in order. The threads of gloo, or of oneCCL on the CPU, may not, but a barrier waits for all operations started
    before it.
    """
    from deepspeed.accelerator import get_accelerator

    is_on_host = get_accelerator().current_device_name() == 'cpu'
    for group in dict.fromkeys(tensor.ds_process_group for tensor in partitioned):
        if is_on_host or dist.get_backend(group) == dist.Backend.GLOO:
            dist.barrier(group)


def _is_partitioned(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, 'ds_id')


def _is_on_nvme(tensor: torch.Tensor) -> bool:
    # DeepSpeed's PartitionedParamStatus (runtime/swap_tensor/partitioned_param_swapper.py)
    return _is_partitioned(tensor) and tensor.ds_tensor.status.name != 'AVAILABLE'


def _partition_group(tensor: torch.Tensor) -> dist.ProcessGroup:
    """The ranks that hold a parameter together. MiCS (DeepSpeed ``runtime/zero/mics.py``) has several such groups."""
    return tensor.comm.param_shard_group if hasattr(tensor, 'comm') else tensor.ds_process_group
