"""Models whose parameters are whole on every rank: one process, DDP, DeepSpeed ZeRO-0 to 2.

DDP and DeepSpeed keep such copies equal. Without them, as in plain processes or between two syncs of LocalSGD, each
rank trains a model of its own, and a folder made of parts of several models would be none of them. So before a save
each rank takes a checksum of each tensor where the tensor lives, at about the speed of its memory, and ranks compare
one array of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from xhf_hooks.collective import Collective, rank_and_world_size
from xhf_hooks.errors import ModelError
from xhf_hooks.format.dtypes import dtype_code
from xhf_hooks.model import names_by_identity
from xhf_hooks.planning.types import SavePlan, Spread, TensorSpec
from xhf_hooks.registry import SOURCES
from xhf_hooks.sources.base import LocalShard, Source
from xhf_hooks.sources.master_fragments import local_fragment, spread_of_fragments

_WORD_NBYTES = 8
_PIECE_NBYTES = 8 * 2**20


class Replicas:
    """The tensors that a save reads and that every rank has whole; empty in a run of one rank.

    Runs on: all ranks, every method.
    """

    def __init__(self, plan: SavePlan, source: Source, world_size: int) -> None:
        specs = plan.reads if world_size > 1 else ()
        names = [spec.name for spec in specs if not spec.from_master]
        self.tensors: Mapping[str, torch.Tensor] = source.replicated(names)
        self._checksums = np.zeros(len(self.tensors), np.int64)
        self._error: Exception | None = None

    def read(self) -> None:
        """Take the checksums. Does not communicate; :meth:`require_same` tells of a failure. Runs on: any thread."""
        try:
            self._checksums = checksums(self.tensors.values())
        except Exception as error:
            self._error = error

    def require_same(self, collective: Collective) -> None:
        """Compare the checksums across ranks.

        Raises:
            ModelError: A tensor differs; the same error on every rank.
            AgreedError: A rank could not take the checksums.
        """
        if not self.tensors:
            return
        collective.agree('compare', self._error)
        differing = np.flatnonzero(self._checksums != collective.broadcast(self._checksums))
        if not collective.any(bool(len(differing)), 'compare'):
            return
        firsts = collective.all_gather((int(differing[0]), len(differing)) if len(differing) else None)
        odd = [rank for rank, found in enumerate(firsts) if found is not None]
        first, most = min(found[0] for found in firsts if found), max(found[1] for found in firsts if found)
        raise ModelError(
            f'{list(self.tensors)[first]}: expected equal copies on all ranks, found other values on ranks {odd} than '
            f'on rank 0 (in {most} of {len(self.tensors)} tensors). Wrap the model in DistributedDataParallel, save '
            f'after ranks have averaged their weights (LocalSGD), or give each model a process group and a folder of '
            f'its own'
        )


def checksums(tensors: Iterable[torch.Tensor]) -> np.ndarray:
    """A checksum of the bits of each tensor."""
    return np.array([int(_checksum(tensor)) for tensor in tensors], np.int64)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the tensor's bytes as 64-bit words, which differs between models that were trained apart."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = data.numel() // _WORD_NBYTES * _WORD_NBYTES
    total = data[whole:].sum()
    for piece in data[:whole].split(_PIECE_NBYTES):
        if piece.storage_offset() % _WORD_NBYTES:  # in a flat buffer; torch does not view it as words
            piece = piece.clone()
        total = total + piece.view(torch.int64).sum()
    return total


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
