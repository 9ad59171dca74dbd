"""Models sharded by torch: FSDP2 (``fully_shard``) and FSDP1 (``FullyShardedDataParallel``).

Importing torch's FSDP takes half a second, so it is imported only where such a model exists.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xhf_hooks.errors import ModelError, TensorError
from xhf_hooks.model import is_class_of, modules_in, parameters_of
from xhf_hooks.planning.spread import Spread
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.base import LocalElements
from xhf_hooks.sources.whole_tensors import WholeTensorsSource

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from typing_extensions import Self


class Fsdp2Source(WholeTensorsSource):
    """Every parameter is a DTensor; rank r holds its r-th ``torch.chunk`` along dimension 0 or another dimension.

    Gathers one DTensor at a time. Parameters that a forward pass without a backward pass has left gathered are freed
    first (:meth:`of`); training gathers them again.

    Raises:
        ModelError: torch is older than 2.6.
    """

    partitioned_by = 'FSDP'
    memory_factor = 3

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        try:
            from torch.distributed.fsdp import FSDPModule
        except ImportError:
            raise ModelError(
                f'the model is sharded by fully_shard (FSDP2) or as DTensors: expected torch 2.6 or newer, which has '
                f'torch.distributed.fsdp.FSDPModule, found torch {torch.__version__}; use FullyShardedDataParallel or '
                f'DeepSpeed'
            ) from None

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().of(model)

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        modules = modules_in(model)
        if any(is_class_of(each, 'torch.distributed', 'FSDPModule') for each in set(map(type, modules))):
            return True
        return any(is_class_of(each, 'torch.distributed', 'DTensor') for each in set(map(type, parameters_of(modules))))

    def spread_of(self, tensor: torch.Tensor) -> Spread | None:
        if _is_whole(tensor):
            return super().spread_of(tensor)
        splits = _row_splits(tensor, self._strides(tensor.device_mesh))
        if splits is None:
            return None
        rows, row_numel = (tensor.shape[0], math.prod(tensor.shape[1:])) if tensor.dim() else (1, 1)
        parts: list[tuple[int, int, int]] = []
        for stride, size in splits:
            if rows % size and len(parts) + 1 < len(splits):
                return None  # the parts of the last part would be smaller
            rows = -(-rows // size)
            parts.append((stride, size, max(1, rows * row_numel)))
        return self._spread_over(tensor.numel(), tuple(parts), self.world_size)

    def local_elements(self, spec: TensorSpec) -> LocalElements:
        tensor = self.tensors[spec.name]
        if _is_whole(tensor):
            return super().local_elements(spec)
        local, expected = tensor.to_local().detach(), self.local_range(tensor)  # detaching a DTensor takes longer
        if local.shape[1:] != tensor.shape[1:] or local.numel() != len(expected):
            raise TensorError(
                f'{spec.name}: expected rows with elements {expected.start} to {expected.stop} of '
                f'{tuple(tensor.shape)} on rank {self.rank}, found a shard of shape {tuple(local.shape)}'
            )
        return LocalElements(expected.start, local.reshape(-1))

    def gather(self, spec: TensorSpec) -> torch.Tensor:
        tensor = self.tensors[spec.name].detach()
        if _is_whole(tensor):
            return tensor
        if tensor.device.type != tensor.device_mesh.device_type:  # offloaded: the mesh gathers on its device
            tensor = tensor.to(tensor.device_mesh.device_type)
        return tensor.full_tensor()


class Fsdp1Source(WholeTensorsSource):
    """Every FSDP module has one flat parameter; each rank holds consecutive elements of it.

    Gathers one flat parameter at a time with ``summon_full_params``. ``FlatParameter`` records where each parameter
    lies in it (torch ``distributed/fsdp/_flat_param.py``: ``_shapes``, ``_numels_with_padding``, and for this rank
    ``_shard_param_infos``). A forward pass without a backward pass has put whole parameters into the modules;
    :meth:`of` puts the sharded ones back.

    Raises:
        ModelError: ``use_orig_params`` is False, or tensor parallelism splits parameters, too.
    """

    partitioned_by = 'FSDP'
    memory_factor = 3

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._modules = _fsdp_modules(model)
        #: The FSDP module of a parameter, its number there, and how many elements precede it in the flat parameter
        self._place: dict[int, tuple[FullyShardedDataParallel, int, int]] = {}
        for module in self._modules:
            if module._handle is not None:  # else all its parameters belong to nested FSDP modules
                flat = module._handle.flat_param
                ends = accumulate(flat._numels_with_padding)
                lengths = zip(ends, flat._numels_with_padding, flat._is_padding_mask, strict=False)
                starts = [end - numel for end, numel, is_padding in lengths if not is_padding]
                for index, (parameter, start) in enumerate(zip(flat._params, starts, strict=True)):
                    self._place[id(parameter)] = module, index, start

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        for module in _fsdp_modules(model):
            handle = module._handle
            if handle is None:
                continue
            if not module._use_orig_params:
                raise ModelError(
                    'FullyShardedDataParallel without use_orig_params keeps only flat parameters; set '
                    'use_orig_params=True (Accelerate: fsdp_use_orig_params: true), or use fully_shard'
                )
            if any(extension is not None for extension in handle.flat_param._param_extensions):
                raise ModelError(
                    'FullyShardedDataParallel over DTensors of tensor parallelism (parallelize_module) cannot be '
                    'saved; use fully_shard (FSDP2), which can'
                )
            if handle._skipped_use_sharded_views:  # after a forward pass without a backward pass
                handle._use_sharded_views()
        return super().of(model)

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        fsdp = sys.modules.get('torch.distributed.fsdp')
        return fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in modules_in(model))

    def spread_of(self, tensor: torch.Tensor) -> Spread | None:
        if not self._is_sharded(tensor):
            return super().spread_of(tensor)
        module, _, skipped = self._place[id(tensor)]
        each = module._handle.flat_param._sharded_size.numel()
        # HYBRID_SHARD has several such groups
        return self.spread_in_group(math.prod(self.full_shape(tensor)), module.process_group, each, skipped)

    def local_elements(self, spec: TensorSpec) -> LocalElements:
        tensor = self.tensors[spec.name]
        if not self._is_sharded(tensor):
            return super().local_elements(spec)
        module, index, _ = self._place[id(tensor)]
        flat = module._handle.flat_param
        of_shard = flat._shard_param_infos[index]
        if not of_shard.in_shard:
            return LocalElements(0, tensor.new_empty(0))
        first = of_shard.offset_in_shard
        shard = getattr(flat, '_local_shard', flat)  # before the first forward pass, the flat parameter itself
        return LocalElements(of_shard.intra_param_start_idx, shard.detach()[first : first + of_shard.numel_in_shard])

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let FSDP find its root module, which it does on first use; a nested module must not become the root."""
        inside = {id(child) for module in self._modules for child in module.modules() if child is not module}
        for module in self._modules:
            if module._is_root is None and id(module) not in inside:
                with module.summon_full_params(module, recurse=False, writeback=False):
                    pass
        yield

    def gathered(self, specs: Sequence[TensorSpec], wanted: Collection[str]) -> dict[str, torch.Tensor]:
        read: dict[str, torch.Tensor] = {}
        by_module: dict[Any, list[str]] = {}
        for spec in specs:
            tensor = self.tensors[spec.name]
            if self._is_sharded(tensor):
                by_module.setdefault(self._place[id(tensor)][0], []).append(spec.name)
            elif spec.name in wanted:
                read[spec.name] = tensor.detach()
        for module, own in by_module.items():
            with module.summon_full_params(module, recurse=False, writeback=False):
                read.update((name, self.tensors[name].detach().clone()) for name in own if name in wanted)
        return read

    def full_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        if id(tensor) not in self._place:
            return tuple(tensor.shape)
        module, index, _ = self._place[id(tensor)]
        return tuple(module._handle.flat_param._shapes[index])

    def _is_sharded(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._place and self._place[id(tensor)][0]._handle.uses_sharded_strategy


def _fsdp_modules(model: nn.Module) -> list[FullyShardedDataParallel]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]


def _is_whole(tensor: torch.Tensor) -> bool:
    return not is_class_of(type(tensor), 'torch.distributed', 'DTensor')


def _row_splits(tensor: DTensor, strides: tuple[int, ...] | None) -> list[tuple[int, int]] | None:
    """How the rows are split over ranks: stride and size of dimensions of the mesh, the outermost split first.

    FSDP splits what tensor parallelism has split, but its dimension of the mesh comes first: then its placement is a
    ``_StridedShard``, whose ``split_factor`` is the number of parts before its split.

    Args:
        strides: The strides of the mesh (:func:`.mesh_strides`).

    Returns:
        None if a rank's elements are not consecutive, as where tensor parallelism splits columns.
    """
    if strides is None:
        return None
    splits: list[tuple[int, int]] = []
    for placement, stride, size in reversed([*zip(tensor.placements, strides, tensor.device_mesh.shape, strict=True)]):
        kind = type(placement).__name__
        if size == 1 or kind == 'Replicate':
            continue
        # The exact classes: a subclass distributes rows in another order
        if kind not in ('Shard', '_StridedShard') or placement.dim != 0:
            return None
        before = [math.prod(size for _, size in splits[:number]) for number in range(len(splits) + 1)]
        factor = placement.split_factor if kind == '_StridedShard' else 1
        if factor not in before:
            return None
        splits.insert(before.index(factor), (stride, size))
    return splits
