"""The plan of a save, and the save that was written by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xhf_hooks.format.index import ADAPTER_WEIGHTS_NAME
from xhf_hooks.planning.rounds import Round
from xhf_hooks.planning.types import CopiedTensor, Group, Placement, Step, TensorSpec, WrittenTensor


@dataclass(frozen=True)
class PlannedFile:
    """A safetensors file: its path relative to the checkpoint, its header and its size."""

    name: str
    header: bytes = field(repr=False)
    nbytes: int

    @property
    def is_of_adapter(self) -> bool:
        """Whether peft loads it, onto a base."""
        return self.name.rpartition('/')[2] == ADAPTER_WEIGHTS_NAME


@dataclass(frozen=True)
class SavePlan:
    """Everything about a save that is known before a tensor is read.

    Attributes:
        in_place: Groups of which every rank writes its own slices at their places in the files.
        rounds: Portions that ranks send to their owners.
        buckets: Groups that must be gathered, bucket by bucket.
        copied: Tensors that are copied from the base model's files.
        indexes: Content of each index file (``model.safetensors.index.json``); a single file has none.
        digest: Hash of all the above. A save starts only if it is equal on all ranks.
    """

    files: tuple[PlannedFile, ...]
    in_place: tuple[Group, ...]
    rounds: tuple[Round, ...]
    buckets: tuple[tuple[Group, ...], ...]
    copied: tuple[CopiedTensor, ...]
    indexes: dict[str, dict[str, Any]]
    digest: str

    @property
    def reads(self) -> tuple[TensorSpec, ...]:
        """The source tensors that a save reads, each once, in the order of the plan."""
        in_groups = (spec for group in (*self.in_place, *self.gathered) for spec in group.reads)
        sent = (portion.read for one_round in self.rounds for portion in one_round.portions)
        return tuple({spec.name: spec for spec in (*sent, *in_groups)}.values())

    @property
    def gathered(self) -> list[Group]:
        """All groups that are gathered."""
        return [group for bucket in self.buckets for group in bucket]

    @property
    def placements(self) -> list[Placement]:
        sent = (portion.placement for one_round in self.rounds for portion in one_round.portions if portion.number == 0)
        in_groups = (placement for group in (*self.in_place, *self.gathered) for placement in group.placements)
        return [*sent, *in_groups, *(one.placement for one in self.copied)]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def largest_bucket_nbytes(self) -> int:
        return max((sum(group.read_nbytes for group in bucket) for bucket in self.buckets), default=0)


@dataclass(frozen=True)
class WrittenSave:
    """A save whose bytes are written but not committed.

    Attributes:
        tensors: The tensors that all ranks have written; empty on other ranks than rank 0.
    """

    plan: SavePlan
    tensors: Sequence[WrittenTensor]
    step: Step
    manifest_fields: Mapping[str, Any] = field(default_factory=dict)
