"""Models whose parameters are whole on every rank: one process, DDP, DeepSpeed ZeRO-0 to 2."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from xhf_hooks.distributed.collective import Collective, rank_and_world_size
from xhf_hooks.format.dtypes import dtype_code
from xhf_hooks.model.tensors import names_by_identity
from xhf_hooks.planning.types import Spread, TensorSpec
from xhf_hooks.registry import SOURCES
from xhf_hooks.sources.base import LocalShard, Source
from xhf_hooks.sources.master_fragments import local_fragment, spread_of_fragments


@SOURCES.register_module()
class ModuleSource(Source):
    """Reads live parameters in place; nothing is gathered.

    At ZeRO-0 to 2 the fp32 masters are spread over the ranks; ``deepspeed.utils.safe_get_full_fp32_param`` assembles
    them one at a time.
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

    def spread(self, masters: Collection[str], collective: Collective) -> dict[str, Spread]:
        fragments = {n: t for n, t in self._tensors.items() if n in masters}
        found = spread_of_fragments(fragments, collective)  # a collective, so it comes before anything that may fail
        others = ((n, self._spread_of(t)) for n, t in self._tensors.items() if n not in masters)
        return found | {name: spread for name, spread in others if spread is not None}

    def _spread_of(self, tensor: torch.Tensor) -> Spread | None:
        """Which elements each rank holds; None if a rank's elements are not consecutive."""
        if not isinstance(tensor, nn.Parameter):  # buffers may differ between ranks: those of rank 0 are saved
            return Spread(tensor.numel(), max(1, tensor.numel()))
        return replace(evenly(tensor.numel()), on_every_rank=True)

    def _held(self, tensor: torch.Tensor) -> range:
        """This rank's elements of a sliced tensor."""
        spread = self._spread_of(tensor)
        return range(0) if spread is None else spread.held_by(rank_and_world_size()[0])

    def local_shard(self, name: str, use_fp32_master: bool) -> LocalShard:
        tensor = self._tensors[name]
        if use_fp32_master and self._has_master(tensor):
            return local_fragment(tensor)
        return LocalShard(0, tensor.detach().reshape(-1))

    def replicated(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        spreads = ((name, self._spread_of(self._tensors[name])) for name in names)
        return {name: self._tensors[name] for name, spread in spreads if spread is not None and spread.on_every_rank}

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], use_fp32_master: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        tensors = {name: self._tensors[name] for name in names}
        from_master = {n: t for n, t in tensors.items() if use_fp32_master and self._has_master(t)}
        read = {n: t.detach() for n, t in tensors.items() if n in wanted and n not in from_master}
        yield {**read, **self._masters(from_master, wanted)}

    def _masters(self, tensors: Mapping[str, torch.Tensor], wanted: Collection[str]) -> dict[str, torch.Tensor]:
        """Whole fp32 masters. All ranks help to assemble each one and keep those that they want."""
        if not tensors:
            return {}
        from deepspeed.utils import safe_get_full_fp32_param

        found = {}
        for name, tensor in tensors.items():
            master = safe_get_full_fp32_param(tensor)
            if name in wanted:
                found[name] = master
        return found

    def _full_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def _has_master(self, tensor: torch.Tensor) -> bool:
        return hasattr(tensor, '_hp_mapping') and tensor.dtype in (torch.float16, torch.bfloat16)


def evenly(numel: int) -> Spread:
    """The spread of a parameter at ZeRO-3: ceil(numel / world_size) elements on each rank."""
    return Spread(numel, max(1, -(-numel // rank_and_world_size()[1])))
