"""What a source offers."""

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

    from xhf_hooks.distributed.collective import Collective


@dataclass(frozen=True)
class LocalShard:
    """What one rank has of a tensor: consecutive elements, in row-major order, from number ``start`` on.

    Attributes:
        is_steady: Nothing but an optimizer's step changes the elements.
    """

    start: int
    elements: torch.Tensor
    is_steady: bool = False


class Source(ABC):
    """Tensors by name, whole or this rank's slices of them, whatever way they are spread over ranks.

    A save calls, on all ranks and in this order: :meth:`specs` and :meth:`spread`, then any number of
    :meth:`local_shard`, then inside one :meth:`opened` any number of :meth:`gathered`, one at a time.

    Attributes:
        memory_factor: About how many times its bytes reading a bucket takes; for telling the user beforehand.
    """

    memory_factor = 1

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @classmethod
    @abstractmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Whether this source can read such a model."""

    @abstractmethod
    def specs(self) -> list[TensorSpec]:
        """Every tensor that a state dict would hold, with its full shape. Touches no data."""

    def require_readable(self, names: Collection[str]) -> None:
        """Refuse what would not be saved as it was trained. Called when a save is planned, on all ranks.

        Raises:
            ModelError: One of them cannot be read.
        """
        return None

    def spread(self, use_fp32_master: bool, collective: Collective) -> dict[str, Spread]:
        """Tensors of which :meth:`local_shard` works, and what each rank has of them. Runs on: all ranks.

        The same on every rank, as long as the specs are; a failure is remembered. Touches no data.
        """
        return {}

    def local_shard(self, name: str, use_fp32_master: bool) -> LocalShard:
        """What this rank has of a tensor: its slice, or all. Without communication.

        The elements may alias live memory.

        Raises:
            TensorError: The tensor is not spread as it should be.
        """
        raise NotImplementedError

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Bring the model into a state in which it can be read, and back. Runs on: all ranks."""
        yield

    @abstractmethod
    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], use_fp32_master: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """Whole tensors. Runs on: all ranks, with the same names.

        The tensors may alias live memory: they are not to be written to. On a GPU they are valid inside
        the block only; on the CPU for as long as they are referred to, while training is not going on.

        Args:
            wanted: Those of ``names`` that this rank is given; the others it only helps to gather.
            use_fp32_master: Give the fp32 master copy of those that have one.
        """
        yield {}
