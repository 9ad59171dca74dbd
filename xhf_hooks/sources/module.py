"""A model whose parameters are whole on every rank: one process, DDP, DeepSpeed ZeRO 0 to 2."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from xhf_hooks.dtypes import dtype_code
from xhf_hooks.module_tensors import module_tensors
from xhf_hooks.records import TensorSpec
from xhf_hooks.registry import SOURCES
from xhf_hooks.sources.base import Source


@SOURCES.register_module()
class ModuleSource(Source):
    """Reads live parameters where they are; nothing is gathered.

    fp32 masters at ZeRO 0 to 2 are spread over ranks; ``deepspeed.utils.safe_get_full_fp32_param``
    assembles them one at a time.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._tensors, self._aliases = _by_identity(model)

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

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], masters: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        tensors = {name: self._tensors[name] for name in names}
        from_master = {n: t for n, t in tensors.items() if masters and self._has_master(t)}
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

    def _full_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def _has_master(self, tensor: torch.Tensor) -> bool:
        return hasattr(tensor, '_hp_mapping') and tensor.dtype in (torch.float16, torch.bfloat16)


def _by_identity(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """Each tensor under its first name, and the other names of each (tied weights).

    Identity decides, not the storage address: DeepSpeed's flat buffers put unrelated tensors into one
    storage.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, list[str]] = {}
    first_name: dict[int, str] = {}
    for name, tensor in module_tensors(model):
        first = first_name.setdefault(id(tensor), name)
        if first == name:
            tensors[name], aliases[name] = tensor, []
        else:
            aliases[first].append(name)
    return tensors, aliases
