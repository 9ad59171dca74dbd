"""The source of models whose parameters are whole on every rank; those of DeepSpeed and FSDP build on it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from xhf_hooks.collective import Collective
from xhf_hooks.compat.torch import rank_and_world_size
from xhf_hooks.errors import ModelError
from xhf_hooks.format.dtypes import dtype_code
from xhf_hooks.format.safetensors import HALF_DTYPES
from xhf_hooks.model import names_by_identity
from xhf_hooks.planning.spread import Spread, mesh_strides, on_one_rank, spread_over
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.registry import SOURCES
from xhf_hooks.sources.base import LocalElements, Source
from xhf_hooks.sources.host_memory import synchronize
from xhf_hooks.sources.master_fragments import (
    local_fragment,
    master_of_fragment,
    may_have_master,
    spread_of_fragments,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


#: Of each fp32 master, this many elements show whose it is.
_SAMPLED_ELEMENTS = 64


@SOURCES.register_module()
class WholeTensorsSource(Source):
    """Of one process, DDP, DeepSpeed ZeRO-0 to 2: each rank has all but the fp32 masters.

    The masters are spread over the ranks, and are gathered only with ``writer='gather'``, or where an output needs
    whole ones. Sources of engines that partition parameters override what differs.
    """

    partitioned_by: str | None = None

    def __init__(self, model: nn.Module) -> None:
        self._rank, self._world_size = rank_and_world_size()
        tensors = names_by_identity(model)
        self._tensors = {names[0]: tensor for tensor, names in tensors}
        self._aliases = {names[0]: names[1:] for _, names in tensors}
        self._strides = cache(_strides_of)  # which takes time for very many ranks
        self._size_of_group = cache(dist.get_world_size)
        self._spread_over = cache(spread_over)  # many tensors have one size
        self._spreads: dict[int, Spread | None] = {}

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return True

    def specs(self) -> list[TensorSpec]:
        found = []
        for name, tensor in self._tensors.items():
            shape, code, aliases = self._full_shape(tensor), dtype_code(tensor.dtype), tuple(self._aliases[name])
            has_master = self._has_master(tensor)
            # Trained in 16 bits without a master that can be read: dtype='float32' widens it, with a warning
            master_lost = code in HALF_DTYPES and tensor.requires_grad and not has_master
            found.append(TensorSpec(name, shape, code, aliases, has_master=has_master, master_lost=master_lost))
        return found

    @property
    def is_on_a_device(self) -> bool:  # type: ignore[override]
        return any(tensor.device.type != 'cpu' for tensor in self._tensors.values())

    def synchronize(self) -> None:
        synchronize({tensor.device for tensor in self._tensors.values()})

    def require_masters_match_weights(self, specs: Sequence[TensorSpec]) -> None:
        pairs = {}
        for spec in specs:
            pair = self._weights_and_master(spec) if spec.from_master else None
            if pair is not None and pair[0].numel():
                pairs[spec.name] = pair
        differing = [
            name for name, is_other in zip(pairs, _are_other_masters([*pairs.values()]), strict=True) if is_other
        ]
        if differing:
            raise ModelError(
                f'{differing[0]}: expected an fp32 master that rounds to the 16-bit weights, found the master of '
                f'another parameter, or an outdated one (in {len(differing)} of {len(pairs)} tensors on rank '
                f"{self._rank}). Set dtype to None, or remove round_robin_gradients or zenflow from DeepSpeed's "
                f'config. A callback that replaces weights (EMA) must replace their masters, too'
            )

    def _weights_and_master(self, spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This rank's elements of a parameter's 16-bit weights, and the same elements of their master."""
        tensor = self._tensors[spec.name]
        fragment = local_fragment(tensor)
        if fragment is None:
            return None
        return tensor.detach().reshape(-1)[fragment.start : fragment.stop], master_of_fragment(tensor)

    def spread(self, specs: Sequence[TensorSpec], collective: Collective) -> dict[str, Spread]:
        fragments = {spec.name: self._tensors[spec.name] for spec in specs if spec.from_master}
        found = spread_of_fragments(fragments, collective)
        of_weights = (
            (spec.name, self._once_spread_of(self._tensors[spec.name])) for spec in specs if not spec.from_master
        )
        return found | {name: spread for name, spread in of_weights if spread is not None}

    def _spread_of(self, tensor: torch.Tensor) -> Spread | None:
        """Which elements each rank holds; None if a rank's elements are not consecutive."""
        if not isinstance(tensor, nn.Parameter):  # buffers may differ between ranks: those of rank 0 are saved
            return on_one_rank(tensor.numel(), 0, self._world_size)
        return self._spread_over(tensor.numel(), (), self._world_size)  # no splits: every rank holds all of it

    def _spread_in_group(self, numel: int, group: dist.ProcessGroup, each: int, skipped: int = 0) -> Spread | None:
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
        return self._spread_over(numel, (split,), self._world_size, skipped)

    def _once_spread_of(self, tensor: torch.Tensor) -> Spread | None:
        """:meth:`_spread_of`, found once per tensor."""
        if id(tensor) not in self._spreads:
            self._spreads[id(tensor)] = self._spread_of(tensor)
        return self._spreads[id(tensor)]

    def _local_range(self, tensor: torch.Tensor) -> range:
        """This rank's elements of a partitioned tensor."""
        spread = self._once_spread_of(tensor)
        return range(0) if spread is None else spread.held_by(self._rank, with_replicas=True)

    def local_elements(self, spec: TensorSpec) -> LocalElements:
        tensor = self._tensors[spec.name]
        if not spec.from_master:
            return LocalElements(0, tensor.detach().reshape(-1))
        fragment = local_fragment(tensor)
        if fragment is None:
            return LocalElements(0, tensor.new_empty(0, dtype=torch.float32))
        return LocalElements(fragment.start, master_of_fragment(tensor))

    def replicated(self, specs: Sequence[TensorSpec]) -> dict[TensorSpec, Spread]:
        spreads = ((spec, self._once_spread_of(self._tensors[spec.name])) for spec in specs)
        return {spec: spread for spec, spread in spreads if spread is not None and spread.replicated}

    def require_device_memory(self, nbytes: int) -> None:
        parameters = [tensor for tensor in self._tensors.values() if isinstance(tensor, nn.Parameter)]
        spreads = ((tensor, self._once_spread_of(tensor)) for tensor in parameters)
        for device in {tensor.device for tensor, spread in spreads if spread is None or not spread.on_every_rank}:
            torch.empty(nbytes, dtype=torch.uint8, device=device)

    def gathered(self, specs: Sequence[TensorSpec], wanted: Collection[str]) -> dict[str, torch.Tensor]:
        read = {}
        for spec in specs:
            whole = self._gather(spec)
            if spec.name in wanted:
                read[spec.name] = whole
        return read

    def _gather(self, spec: TensorSpec) -> torch.Tensor:
        """One whole tensor; all ranks help to assemble it."""
        if not spec.from_master:
            return self._tensors[spec.name].detach()
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(self._tensors[spec.name])

    def _full_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def _has_master(self, tensor: torch.Tensor) -> bool:
        is_half = tensor.dtype in (torch.float16, torch.bfloat16)
        return is_half and may_have_master(tensor) and self._has_fp32_masters

    @cached_property
    def _has_fp32_masters(self) -> bool:
        """Whether masters are in fp32, not in 16 bits as with DeepSpeed's ``bf16_master_weights_and_grads``."""
        held = (tensor for tensor in self._tensors.values() if local_fragment(tensor) is not None)
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
