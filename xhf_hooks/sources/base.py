"""What a save needs of a training engine: the contract of sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from xhf_hooks.planning.types import TensorSpec

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

    from xhf_hooks.planning.spread import Spread
    from xhf_hooks.ranks.collective import Collective


@dataclass(frozen=True)
class LocalElements:
    """The elements of a tensor that one rank holds: consecutive in row-major order.

    Attributes:
        start: Index of the first element in the whole tensor.
        elements: The elements, in one dimension and in the dtype of the spec: ``reshape(-1)`` of a block of rows.
    """

    start: int
    elements: torch.Tensor


class Source(ABC):
    """Gives the tensors of a live model by name, either whole or as the elements that this rank holds.

    An engine must say which tensors there are (:meth:`specs`), and assemble them (:meth:`gathered`). All else is
    optional: as it stands here, no rank can read anything alone, so every tensor is gathered.

    A source is made for each save by :meth:`of`, on all ranks, and never changes the model. A save that is planned
    already skips :meth:`spread` and :meth:`require_readable`. In this order:

    1. To plan: :meth:`specs`, :meth:`spread`, :meth:`require_readable`. They give the same on all ranks, or ranks do
       not hold the same model. To plan, and at each save: :meth:`require_masters_match_weights`, which looks at what
       this rank holds, and may fail on one rank alone.
    2. :meth:`replicated` and :meth:`local_elements`, any number of times, for tensors that :meth:`spread` names. They
       do not communicate; ranks may call them at any time and in any order.
    3. :meth:`require_device_memory`, then inside one :meth:`opened`, :meth:`gathered` any number of times, for all
       other tensors. All ranks call it with the same specs in the same order; a rank that fails raises only after it
       has taken part.

    Where a spec has ``from_master``, its fp32 master is read. :meth:`specs` never sets it: where the option ``dtype``
    is another one than in training, prepare_saves() sets it in the specs that have a master.

    Args:
        model: The trained model; the outermost FSDP1 wrapper, if there is one.

    Attributes:
        memory_factor: Approximate memory needed to gather a bucket, as a multiple of its size. For the log.
        is_on_a_device: Whether any tensor is not in host memory.
        partitioned_by: What partitions the parameters, for messages; None if they are whole on every rank.
    """

    memory_factor = 1
    is_on_a_device = False
    partitioned_by: str | None = 'the training engine'

    @abstractmethod
    def __init__(self, model: nn.Module) -> None: ...

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Make the source of a model. If the engine has to change its state before it can be read, it does so here.

        Raises:
            ModelError: The source cannot read this model.
        """
        return cls(model)

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Whether this source can read the model. The first one that can is used (:mod:`xhf_hooks.registry`)."""
        return False

    @classmethod
    def open_wrapper(cls, wrapper: Any) -> tuple[Any, dict[str, Any]] | None:
        """What a wrapper of this engine holds, such as DeepSpeed's engine; None if it is none of this engine's.

        Wrappers of torch (DDP, FSDP1, ``torch.compile``) are known, and may be inside or around it.

        Returns:
            The model in it, and fields of the manifest: ``engine``, and what else is worth noting.
        """
        return None

    @abstractmethod
    def specs(self) -> list[TensorSpec]:
        """Every tensor of the state dict, with its full shape. Reads no data."""

    @abstractmethod
    def gathered(self, specs: Sequence[TensorSpec], wanted: Collection[str]) -> dict[str, torch.Tensor]:
        """Whole tensors by name. Runs on: all ranks, with the same specs.

        The tensors may alias live memory, so callers must not write to them. They are valid until training goes on.
        Reading them involves no other rank: the others may have gone on while this one waits for its disk.

        Args:
            wanted: The names that this rank receives. For other names, it only takes part in gathering.
        """

    def synchronize(self) -> None:
        """Wait until the model's devices have finished the queued work of training, also on the user's own streams."""
        return None

    def require_readable(self, names: Collection[str]) -> None:
        """Refuse tensors that cannot be saved as trained. Called on all ranks when a save is planned.

        Raises:
            ModelError: One of the tensors cannot be read.
        """
        return None

    def require_masters_readable(self, engine: Any | None, *, are_read: bool, are_missing: bool) -> None:
        """Refuse the option ``dtype`` where the engine has fp32 masters that this source would read wrongly, or misses.

        Called on all ranks when a save is planned.

        Args:
            engine: What :meth:`open_wrapper` has opened; or the engine's optimizer, where a trainer shows nothing else.
                None without either.
            are_read: Whether the save reads masters.
            are_missing: Whether the save widens a trained 16-bit tensor, since no master of it is known.

        Raises:
            OptionError: The engine has such masters.
        """
        return None

    def require_masters_match_weights(self, specs: Sequence[TensorSpec]) -> None:
        """Refuse fp32 masters that do not round to their 16-bit weights.

        They belong to other parameters, or are outdated. Called on all ranks when a save is planned and at each save; a
        rank compares samples of what it holds.

        Raises:
            ModelError: The masters are not those of the parameters.
        """
        return None

    def spread(self, specs: Sequence[TensorSpec], collective: Collective) -> dict[str, Spread]:
        """Names of the tensors that :meth:`local_elements` can read, and which elements each rank holds.

        Runs on: all ranks, with the same result. Reads no data.

        Raises:
            AgreedError: A rank failed while ranks exchanged what they hold.
        """
        return {}

    def local_elements(self, spec: TensorSpec) -> LocalElements:
        """The elements of a tensor that this rank holds, perhaps all of them. Does not communicate.

        The elements may alias live memory.

        Raises:
            TensorError: The tensor is not partitioned as expected.
        """
        raise NotImplementedError(f'{type(self).__name__}.spread() names {spec.name}: it needs local_elements()')

    def replicated(self, specs: Sequence[TensorSpec]) -> dict[TensorSpec, Spread]:
        """The tensors of which several ranks hold the same elements, which must be equal. Reads no data."""
        return {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the model readable, and restore its state afterwards. Runs on: all ranks."""
        yield

    def require_device_memory(self, nbytes: int) -> None:
        """Allocate memory for a bucket and free it, for torch to keep: a rank without it would fail in the gather.

        Raises:
            RuntimeError: A device of partitioned parameters is out of memory.
        """
        return None
