"""A model whose parameters are whole on every rank: one process, DDP, DeepSpeed ZeRO 0 to 2."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from xhf_hooks.distributed.collective import rank_and_world_size
from xhf_hooks.format.dtypes import dtype_code
from xhf_hooks.model.tensors import names_by_identity
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.registry import SOURCES
from xhf_hooks.sources.base import LocalShard, Source


@SOURCES.register_module()
class ModuleSource(Source):
    """Reads live parameters where they are; nothing is gathered.

    fp32 masters at ZeRO 0 to 2 are spread over ranks; ``deepspeed.utils.safe_get_full_fp32_param``
    assembles them one at a time.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        tensors = names_by_identity(model)
        self._tensors = {names[0]: tensor for tensor, names in tensors}
        self._aliases = {names[0]: names[1:] for _, names in tensors}

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return True

    def specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(
                name,
                self._full_shape(tensor),
                dtype_code(tensor.dtype),
                aliases=tuple(self._aliases[name]),
                has_master=self._has_master(tensor),
            )
            for name, tensor in self._tensors.items()
        ]

    def shardable(self, use_fp32_master: bool) -> set[str]:
        return set(self._tensors)

    def local_shard(self, name: str, use_fp32_master: bool) -> LocalShard:
        tensor = self._tensors[name]
        if use_fp32_master and self._has_master(tensor):
            return self._local_master_shard(tensor)
        rank, world_size = rank_and_world_size()
        if not isinstance(tensor, nn.Parameter):  # buffers need not be the same on every rank
            return LocalShard(0, tensor.detach().reshape(-1) if rank == 0 else tensor.new_empty(0))
        start, end = share(tensor.numel(), rank, world_size)
        return LocalShard(start, tensor.detach().reshape(-1)[start:end])

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], use_fp32_master: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        tensors = {name: self._tensors[name] for name in names}
        from_master = {n: t for n, t in tensors.items() if use_fp32_master and self._has_master(t)}
        read = {n: t.detach() for n, t in tensors.items() if n in wanted and n not in from_master}
        yield {**read, **self._masters(from_master, wanted)}

    def _masters(self, tensors: Mapping[str, torch.Tensor], wanted: Collection[str]) -> dict[str, torch.Tensor]:
        """Whole fp32 masters; all ranks take part in assembling each, and keep what they want."""
        if not tensors:
            return {}
        from deepspeed.utils import safe_get_full_fp32_param

        found = {}
        for name, tensor in tensors.items():
            master = safe_get_full_fp32_param(tensor)
            if name in wanted:
                found[name] = master
        return found

    def _local_master_shard(self, tensor: torch.Tensor) -> LocalShard:
        """DeepSpeed's mapping of a parameter to this rank's part of the flat masters (``utils/tensor_fragment.py``)."""
        mapping = tensor._hp_mapping
        if mapping is None:  # its master is on other ranks altogether
            return LocalShard(0, torch.empty(0, dtype=torch.float32))
        return LocalShard(mapping.lp_fragment_address.start, mapping.get_hp_fragment().detach().reshape(-1))

    def _full_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def _has_master(self, tensor: torch.Tensor) -> bool:
        return hasattr(tensor, '_hp_mapping') and tensor.dtype in (torch.float16, torch.bfloat16)


def share(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and end of a rank's elements, as ZeRO-3 splits a parameter: ceil(numel / world_size) each."""
    each = -(-numel // world_size)
    return min(rank * each, numel), min((rank + 1) * each, numel)
