"""The tensors that a conversion would write, read from the checkpoint: for the conversion, and for ``xhf-verify``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.types import Group, Placement
from xhf_hooks.sources.read import made_from
from xhf_hooks.sources.stored_tensors import StoredTensor


class PlannedOutputs:
    """A plan, and the stored tensors that it reads. Used by: several threads.

    Args:
        tensors: By the names in the plan.
    """

    def __init__(self, plan: SavePlan, tensors: Mapping[str, StoredTensor]) -> None:
        self.plan = plan
        self._tensors = tensors

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read from the checkpoint."""
        return sum(self._tensors[spec.name].read_nbytes(spec.from_master) for spec in self.plan.reads)

    def read_into(self, group: Group, placement: Placement, start: int, out: torch.Tensor) -> None:
        """Cast elements of an output of a group of ``plan.in_place`` into ``out``, from ``start`` on."""
        (spec,) = group.reads
        self._tensors[spec.name].read_into(placement.source_range.start + start, out, from_master=spec.from_master)

    def make(self, group: Group) -> Iterator[tuple[Placement, torch.Tensor]]:
        """The outputs of a group of ``plan.gathered``, whole."""
        with torch.no_grad():
            tensors = {spec.name: self._tensors[spec.name].whole(spec.from_master) for spec in group.reads}
            yield from made_from(group, tensors, 0)
