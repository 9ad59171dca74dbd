"""The interface of sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xhf_hooks.planning.types import Spread, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from xhf_hooks.collective import Collective


@dataclass(frozen=True)
class LocalShard:
    """The elements of a tensor that one rank holds: consecutive in row-major order, the first with index ``start``."""

    start: int
    elements: torch.Tensor


class Source(ABC):
    """Gives tensors by name, either whole or as this rank's local shard, however they are partitioned.

    A save calls, on all ranks and in this order: :meth:`specs` and :meth:`spread`; then :meth:`local_shard` any number
    of times; then, inside one :meth:`opened`, :meth:`gathered` any number of times, one at a time.

    Attributes:
        memory_factor: Approximate memory needed to gather a bucket, as a multiple of its size. For the log.
    """

    memory_factor = 1

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @classmethod
    @abstractmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Whether this source can read the model."""

    @abstractmethod
    def specs(self) -> list[TensorSpec]:
        """Every tensor of the state dict, with its full shape. Reads no data."""

    def require_readable(self, names: Collection[str]) -> None:
        """Refuse tensors that cannot be saved as trained. Called on all ranks when a save is planned.

        Raises:
            ModelError: One of the tensors cannot be read.
        """
        return None

    def spread(self, masters: Collection[str], collective: Collective) -> dict[str, Spread]:
        """Tensors that :meth:`local_shard` can read, and the elements that each rank holds. Runs on: all ranks.

        The result is the same on every rank if the specs are. A failure is remembered. Reads no data.

        Args:
            masters: The names of which :meth:`local_shard` will read the fp32 master.
        """
        return {}

    def local_shard(self, name: str, use_fp32_master: bool) -> LocalShard:
        """This rank's local shard of a tensor, which may be all of it. Does not communicate.

        The elements may alias live memory.

        Raises:
            TensorError: The tensor is not partitioned as expected.
        """
        raise NotImplementedError

    def replicated(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Those of the tensors of which every rank holds a whole copy, which must be equal. Reads no data."""
        return {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the model readable, and restore its state afterwards. Runs on: all ranks."""
        yield

    @abstractmethod
    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], use_fp32_master: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """Whole tensors. Runs on: all ranks, with the same names.

        The tensors may alias live memory, so callers must not write to them. On a GPU they are valid only inside the
        block; on the CPU, until training goes on.

        Args:
            wanted: The names that this rank receives. For the others, it only takes part in gathering.
            use_fp32_master: Return the fp32 master copies where they exist.
        """
        yield {}
