"""The source of models whose parameters are whole on every rank. Sources of engines that partition them build on it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from xhf_hooks.compat.torch import rank_and_world_size
from xhf_hooks.errors import ModelError
from xhf_hooks.format.dtypes import TORCH_DTYPES, dtype_code
from xhf_hooks.format.safetensors import HALF_DTYPES
from xhf_hooks.model import names_by_identity
from xhf_hooks.planning.spread import Spread, mesh_strides, on_one_rank, spread_over
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.sources.base import LocalElements, Source
from xhf_hooks.sources.checks import read_local_elements, require_elements
from xhf_hooks.sources.host_memory import synchronize
from xhf_hooks.sources.master_fragments import (
    local_fragment,
    master_of_fragment,
    may_have_master,
    refuse_unnamed_fp32_masters,
    refuse_unreadable_fp32_masters,
    spread_of_fragments,
)
from xhf_hooks.system.versions import require_packages

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


#: Of each fp32 master, this many elements show whose it is.
_SAMPLED_ELEMENTS = 64


class WholeTensorsSource(Source):
    """Of one process, DDP, DeepSpeed ZeRO-0 to 2: each rank has all but the fp32 masters.

    The masters are spread over the ranks, and are gathered only with ``writer='gather'``, or where an output needs
    whole ones.

    The source of an engine that partitions parameters derives from this one. It inherits the names of tensors (ties by
    identity, no wrappers' path components, no buffers but persistent ones), and overrides what differs:

    - :meth:`full_shape` and :meth:`spread_of`, if each rank holds consecutive elements, such as rows. With these two
      alone ranks write their slices, and tensors are gathered where an output needs whole ones.
    - :meth:`local_elements`, if a rank's elements are elsewhere than in the parameter.
    - :meth:`gather`, if the engine has a better way, or where :meth:`spread_of` returns None.
    - :meth:`has_master`, :meth:`local_elements` and :meth:`weights_and_master`, if it has fp32 masters. They are spread
      as their parameters are.
    - :meth:`of`, if the engine has to change its state before it can be read, as FSDP frees what it has gathered.

    Attributes:
        tensors: The parameters and persistent buffers, by the first of their names.
        rank: This rank.
        world_size: The number of ranks.
    """

    partitioned_by: str | None = None

    def __init__(self, model: nn.Module) -> None:
        self.rank, self.world_size = rank_and_world_size()
        tensors = names_by_identity(model)
        self.tensors = {names[0]: tensor for tensor, names in tensors}
        self._aliases = {names[0]: names[1:] for _, names in tensors}
        self._strides = cache(_strides_of)  # which takes time for very many ranks
        self._size_of_group = cache(dist.get_world_size)
        self._spread_over = cache(spread_over)  # many tensors have one size
        self._spreads: dict[int, Spread | None] = {}

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return True

    @classmethod
    def open_wrapper(cls, wrapper: Any) -> tuple[Any, dict[str, Any]] | None:
        """DeepSpeed's engine, of any stage.

        Raises:
            InstalledError: DeepSpeed is too old.
        """
        if not hasattr(wrapper, 'zero_optimization_stage'):
            return None
        require_packages('deepspeed')
        return wrapper.module, {'engine': 'deepspeed', 'zero_stage': wrapper.zero_optimization_stage()}

    def specs(self) -> list[TensorSpec]:
        found = []
        for name, tensor in self.tensors.items():
            shape, code, aliases = self.full_shape(tensor), dtype_code(tensor.dtype), tuple(self._aliases[name])
            has_master = self.has_master(tensor)
            # Trained in 16 bits without a master that can be read: dtype='float32' widens it, with a warning
            master_lost = code in HALF_DTYPES and tensor.requires_grad and not has_master
            found.append(TensorSpec(name, shape, code, aliases, has_master=has_master, master_lost=master_lost))
        return found

    @property
    def is_on_a_device(self) -> bool:  # type: ignore[override]
        return any(tensor.device.type != 'cpu' for tensor in self.tensors.values())

    def synchronize(self) -> None:
        synchronize({tensor.device for tensor in self.tensors.values()})

    def require_masters_readable(self, engine: Any | None, *, are_read: bool, are_missing: bool) -> None:
        if are_read:
            refuse_unreadable_fp32_masters(engine)
        # There is a warning if there are no masters, and an error if DeepSpeed has some but does not show which
        # parameter each belongs to, as at stage 0
        if are_missing:
            refuse_unnamed_fp32_masters(engine)

    def require_masters_match_weights(self, specs: Sequence[TensorSpec]) -> None:
        pairs = {}
        for spec in specs:
            pair = self.weights_and_master(spec) if spec.from_master else None
            if pair is not None and pair[0].numel():
                pairs[spec.name] = pair
        differing = [
            name for name, is_other in zip(pairs, _are_other_masters([*pairs.values()]), strict=True) if is_other
        ]
        if differing:
            raise ModelError(
                f'{differing[0]}: expected an fp32 master that rounds to the 16-bit weights, found the master of '
                f'another parameter, or an outdated one (in {len(differing)} of {len(pairs)} tensors on rank '
                f"{self.rank}). Set dtype to None, or remove round_robin_gradients or zenflow from DeepSpeed's "
                f'config. A callback that replaces weights (EMA) must replace their masters, too'
            )

    def weights_and_master(self, spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This rank's elements of a parameter's 16-bit weights, and the same elements of their master."""
        tensor = self.tensors[spec.name]
        fragment = local_fragment(tensor)
        if fragment is None:
            return None
        return tensor.detach().reshape(-1)[fragment.start : fragment.stop], master_of_fragment(tensor)

    def spread(self, specs: Sequence[TensorSpec], collective: Collective) -> dict[str, Spread]:
        tensors = {spec.name: self.tensors[spec.name] for spec in specs}
        fragments = {spec.name for spec in specs if spec.from_master and may_have_master(tensors[spec.name])}
        found = spread_of_fragments({name: tensors[name] for name in tensors if name in fragments}, collective)
        spreads = ((name, self._once_spread_of(tensors[name])) for name in tensors if name not in fragments)
        return found | {name: spread for name, spread in spreads if spread is not None}

    def spread_of(self, tensor: torch.Tensor) -> Spread | None:
        """Which elements each rank holds, the same on all ranks; None if a rank's elements are not consecutive."""
        if not isinstance(tensor, nn.Parameter):  # buffers may differ between ranks: those of rank 0 are saved
            return on_one_rank(tensor.numel(), 0, self.world_size)
        return self._spread_over(tensor.numel(), (), self.world_size)  # no splits: every rank holds all of it

    def spread_in_group(self, numel: int, group: dist.ProcessGroup, each: int, skipped: int = 0) -> Spread | None:
        """The spread of a tensor that each of several groups of ranks holds together, in the order of its ranks.

        None if the group's ranks are not evenly spaced.

        Args:
            each: Elements per rank of a group; the last rank may have fewer.
            skipped: Elements of the group's flat buffer before this tensor.
        """
        strides = self._strides(group)
        if strides is None:
            return None
        (stride,) = strides  # a group has one dimension
        split = stride, self._size_of_group(group), max(1, each)
        return self._spread_over(numel, (split,), self.world_size, skipped)

    def _once_spread_of(self, tensor: torch.Tensor) -> Spread | None:
        """:meth:`spread_of`, found once per tensor."""
        if id(tensor) not in self._spreads:
            self._spreads[id(tensor)] = self.spread_of(tensor)
        return self._spreads[id(tensor)]

    def local_range(self, tensor: torch.Tensor) -> range:
        """This rank's elements of a partitioned tensor."""
        spread = self._once_spread_of(tensor)
        return range(0) if spread is None else spread.held_by(self.rank, with_replicas=True)

    def local_elements(self, spec: TensorSpec) -> LocalElements:
        tensor = self.tensors[spec.name]
        if not spec.from_master:
            held = tensor.detach().reshape(-1)
            if tuple(tensor.shape) == spec.shape:
                return LocalElements(0, held)
            expected = self.local_range(tensor)
            return LocalElements(expected.start, held[: len(expected)])  # the engine may pad the last part
        fragment = local_fragment(tensor)
        if fragment is None:
            return LocalElements(0, tensor.new_empty(0, dtype=torch.float32))
        return LocalElements(fragment.start, master_of_fragment(tensor))

    def replicated(self, specs: Sequence[TensorSpec]) -> dict[TensorSpec, Spread]:
        spreads = ((spec, self._once_spread_of(self.tensors[spec.name])) for spec in specs)
        return {spec: spread for spec, spread in spreads if spread is not None and spread.replicated}

    def require_device_memory(self, nbytes: int) -> None:
        parameters = [tensor for tensor in self.tensors.values() if isinstance(tensor, nn.Parameter)]
        spreads = ((tensor, self._once_spread_of(tensor)) for tensor in parameters)
        for device in {tensor.device for tensor, spread in spreads if spread is None or not spread.on_every_rank}:
            torch.empty(nbytes, dtype=torch.uint8, device=device)

    def gathered(self, specs: Sequence[TensorSpec], wanted: Collection[str]) -> dict[str, torch.Tensor]:
        read: dict[str, torch.Tensor] = {}
        error: Exception | None = None
        for spec in specs:
            try:
                whole = self.gather(spec)
            except Exception as caught:  # of any type: the other ranks gather the next tensors with this one
                error = error or caught
                continue
            if spec.name in wanted:
                read[spec.name] = whole
        if error is not None:
            raise error
        return read

    def gather(self, spec: TensorSpec) -> torch.Tensor:
        """One whole tensor. Runs on: all ranks; one that fails raises only after it has taken part."""
        tensor = self.tensors[spec.name]
        if spec.from_master and may_have_master(tensor):
            from deepspeed.utils import safe_get_full_fp32_param

            return safe_get_full_fp32_param(tensor)
        spread = self._once_spread_of(tensor)
        if spread is None or spread.on_every_rank or not isinstance(tensor, nn.Parameter):
            return tensor.detach()
        return self._assemble(spec, [spread.held_by(rank, with_replicas=True) for rank in range(self.world_size)])

    def _assemble(self, spec: TensorSpec, held: Sequence[range]) -> torch.Tensor:
        """A whole tensor from what each rank holds. Runs on: all ranks.

        Args:
            held: The elements that each rank holds.
        """
        tensor, dtype = self.tensors[spec.name], TORCH_DTYPES[spec.dtype]
        own = torch.zeros(max(map(len, held)), dtype=dtype, device=tensor.device)
        error: Exception | None = None
        try:
            found = read_local_elements(self, spec)
            require_elements(spec, found, held[self.rank], self.rank)
            own[: found.elements.numel()] = found.elements
        except Exception as caught:  # of any type: the other ranks wait for this one in the collective
            error = caught
        parts = [torch.empty_like(own) for _ in held]
        # As bytes: backends do not know all dtypes
        dist.all_gather([part.view(torch.uint8) for part in parts], own.view(torch.uint8))
        if error is not None:
            raise error
        whole = own.new_empty(math.prod(spec.shape))
        for elements, part in zip(held, parts, strict=True):
            whole[elements.start : elements.stop] = part[: len(elements)]
        return whole.view(spec.shape)

    def full_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(tensor.shape)

    def has_master(self, tensor: torch.Tensor) -> bool:
        """Whether the engine keeps an fp32 master of this tensor that :meth:`local_elements` can read."""
        is_half = tensor.dtype in (torch.float16, torch.bfloat16)
        return is_half and may_have_master(tensor) and self._has_fp32_masters

    @cached_property
    def _has_fp32_masters(self) -> bool:
        """Whether masters are in fp32, not in 16 bits as with DeepSpeed's ``bf16_master_weights_and_grads``."""
        held = (tensor for tensor in self.tensors.values() if local_fragment(tensor) is not None)
        dtypes = (master_of_fragment(tensor).dtype for tensor in held)
        return next(dtypes, torch.float32) == torch.float32


def _are_other_masters(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """For each pair of weights and master, whether a sample of the master does not round to the same elements.

    Copies nothing to a device, and waits for one twice at most: for the samples of weights whose masters are in host
    memory, all at once, and for the answers about masters on the device.
    """
    steps = [max(1, weights.numel() // _SAMPLED_ELEMENTS) for weights, _ in pairs]
    expected = [weights[::step] for (weights, _), step in zip(pairs, steps, strict=True)]
    found = [master[::step] for (_, master), step in zip(pairs, steps, strict=True)]
    apart = [i for i, (one, other) in enumerate(zip(expected, found, strict=True)) if one.device != other.device]
    if apart:
        on_host = torch.cat([expected[i] for i in apart]).to('cpu')
        for i, sample in zip(apart, on_host.split([len(expected[i]) for i in apart]), strict=True):
            expected[i] = sample.to(expected[i].dtype)
    answers = [torch.ones((), dtype=torch.bool, device=one.device) for one in expected]
    for i, (one, other) in enumerate(zip(expected, found, strict=True)):
        if pairs[i][0].numel() == pairs[i][1].numel():
            answers[i] = ((other.to(one.dtype) != one) & (one == one)).any()  # NaN differs from itself
    return _on_host(answers)


def _on_host(answers: Sequence[torch.Tensor]) -> list[bool]:
    """The values of answers; waits once for each device."""
    values = [False] * len(answers)
    for device in {answer.device for answer in answers}:
        there = [i for i, answer in enumerate(answers) if answer.device == device]
        for i, value in zip(there, torch.stack([answers[i] for i in there]).tolist(), strict=True):
            values[i] = value
    return values


def _strides_of(holders: dist.ProcessGroup | DeviceMesh) -> tuple[int, ...] | None:
    """How far apart the ranks are in each dimension; None if they are not evenly spaced. A group has one dimension."""
    mesh = getattr(holders, 'mesh', None)
    return mesh_strides(np.array(dist.get_process_group_ranks(holders) if mesh is None else mesh.tolist()))
