"""The whole flow of a save, on one page.

Source.specs()      what there is                     names and full shapes, no data
Exporter.entries()  what goes out, under which names
make_plan()         where each byte will lie          digest compared across ranks
gather()            one bucket at a time              under deepspeed.zero.GatheredParameters at ZeRO-3
Writer.write()      into a staging folder             while the next bucket is gathered
commit()            staging gets the final name       then, and only then, older saves are deleted
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from xhf_hooks import writers as _builtin_writers  # noqa: F401  (registers them)
from xhf_hooks.collective import Collective
from xhf_hooks.commit.staging import CheckpointFolder
from xhf_hooks.errors import XhfError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.gather import gather
from xhf_hooks.memory import MemoryMeter
from xhf_hooks.plan import describe_plan, make_plan
from xhf_hooks.records import CommittedCheckpoint, SaveCost, SavePlan, Step, TensorSpec, WriteReceipt
from xhf_hooks.registry import WRITERS
from xhf_hooks.sources import source_for
from xhf_hooks.version import package_versions


@dataclass(frozen=True)
class SaveOptions:
    """How to save. The hook's options of the same names, parsed.

    Attributes:
        module: Dotted path of the PreTrainedModel in the trained model; None finds it.
        dtype: Element-type code that floats are cast to; None keeps them as trained. ``'F32'`` takes the
            fp32 master weights where there are any.
        lora: 'adapter', 'merge' or 'both' for a model with a LoRA adapter; None for any other.
        facts: What else the manifest says, such as engine and ZeRO stage.
    """

    module: str | None = None
    dtype: str | None = None
    lora: str | None = None
    max_shard_nbytes: int = 5 * 10**9
    bucket_nbytes: int = 128 * 10**6
    writer: str = 'stream'
    facts: dict[str, Any] = field(default_factory=dict)


class Saver:
    """Saves one live model, any number of times. Runs on: all ranks, every method.

    Args:
        model: The bare trained module (not the engine or wrapper around it).

    Attributes:
        exporter: Set by :meth:`prepare`.
        plan: Set by :meth:`prepare`, renewed when the model's tensors change.
    """

    def __init__(self, model: nn.Module, options: SaveOptions, collective: Collective) -> None:
        self._model = model
        self._options = options
        self._collective = collective
        self._specs: list[TensorSpec] | None = None
        self.plan: SavePlan | None = None
        self._tokenizer: Any | None = None
        self._stop_token_ids: Sequence[int] = ()

    def set_tokenizer(self, tokenizer: Any | None, stop_token_ids: Sequence[int] = ()) -> None:
        """What to write beside the weights, and the tokens that end an answer. Runs on: rank 0."""
        self._tokenizer, self._stop_token_ids = tokenizer, stop_token_ids

    def prepare(self) -> SavePlan:
        """Plan the save from metadata alone and compare the plan across ranks.

        Raises:
            AgreedError: The model cannot be exported; the reason is in it.
            PlanError: Ranks hold different models.
        """
        with self._collective.stage('plan'):
            self._source = source_for(self._model)
            self.exporter = exporter_for(self._model, self._options.module, lora=self._options.lora)
            self._make_plan(self._source.specs())
        self._collective.require_same('the save plan', self.plan.digest, lambda: describe_plan(self.plan))
        return self.plan

    @property
    def expected_extra_nbytes(self) -> int:
        """About how much memory a save takes on the busiest rank."""
        return self._source.memory_factor * self.plan.largest_bucket_nbytes

    def rehearse(self, folder: CheckpointFolder) -> list[str]:
        """Write and remove the files around the weights, where they will go. Runs on: rank 0.

        Returns:
            Warnings for the log.
        """
        try:
            return self.exporter.write_sidecar(folder.open_staging(), self._tokenizer, self._stop_token_ids)
        finally:
            folder.abandon()

    def save(
        self, folder: CheckpointFolder, step: Step, on_progress: Callable[[int, int], None] | None = None
    ) -> CommittedCheckpoint:
        """Write and commit one checkpoint.

        Args:
            on_progress: Called after each tensor, on ranks that write, with bytes written and bytes in all.

        Raises:
            AgreedError: A rank failed, in the stage it names; the previous checkpoint is untouched.
            PlanError: Ranks hold different models.
        """
        started, meter = time.perf_counter(), MemoryMeter()
        self._source = source_for(self._model)
        if any(self._collective.all_gather(self._source.specs() != self._specs)):
            self.prepare()  # tensors were frozen, unfrozen, resized or replaced since
        is_rank0 = self._collective.rank == 0
        warnings: list[str] = []
        try:
            with self._collective.stage('staging'):
                if is_rank0:
                    staging = folder.open_staging()
                    folder.require_room(self.plan.nbytes)
                    warnings += self.exporter.write_sidecar(staging, self._tokenizer, self._stop_token_ids)
            receipts, overflows = self._write(folder, meter, on_progress)
            with self._collective.stage('commit'):
                if is_rank0:
                    folder.commit(self.plan, receipts, step, {'packages': package_versions(), **self._facts()})
        except XhfError:
            if is_rank0:
                folder.abandon()
            raise
        peak, overflows = self._busiest(meter, overflows)
        cost = SaveCost(self.plan.nbytes, time.perf_counter() - started, peak, overflows)
        if overflows:
            warnings.append(f'{overflows} finite weights became infinite in {self._options.dtype}')
        return CommittedCheckpoint(folder.final, step, cost, tuple(warnings))

    def _make_plan(self, specs: list[TensorSpec]) -> None:
        self._specs = specs
        if self._masters:
            specs = [replace(spec, dtype='F32') if spec.has_master else spec for spec in specs]
        self.plan = make_plan(
            self.exporter.entries(specs, self._options.dtype),
            specs,
            max_shard_nbytes=self._options.max_shard_nbytes,
            bucket_nbytes=self._half_bucket,
            n_parameters=self.exporter.n_parameters,
        )

    def _write(
        self, folder: CheckpointFolder, meter: MemoryMeter, on_progress: Callable[[int, int], None] | None
    ) -> tuple[list[WriteReceipt], int]:
        writer = WRITERS.get(self._options.writer)(pending_nbytes=self._half_bucket, fsync=folder.fsync)
        overflows = done_nbytes = 0
        try:
            # All ranks enter and leave the source together, so its collectives match even on failure.
            with self._source.opened(), self._collective.stage('write'), torch.no_grad():
                writer.open(self.plan, folder.staging, self._collective.rank)
                chunks = gather(self.plan, self._source, self._collective, masters=self._masters, meter=meter)
                with closing(chunks):
                    for chunk in chunks:
                        overflows += chunk.overflows
                        writer.write(chunk)
                        done_nbytes += chunk.placement.nbytes
                        if on_progress is not None:
                            on_progress(done_nbytes, self.plan.nbytes)
                return writer.finish(), overflows
        finally:
            writer.abort()

    @property
    def _half_bucket(self) -> int:
        """One half of the bucket is gathered while the other is written."""
        return max(1, self._options.bucket_nbytes // 2)

    @property
    def _masters(self) -> bool:
        return self._options.dtype == 'F32'

    def _busiest(self, meter: MemoryMeter, overflows: int) -> tuple[int, int]:
        reports = self._collective.all_gather((meter.peak_extra_nbytes, overflows))
        return max(peak for peak, _ in reports), sum(count for _, count in reports)

    def _facts(self) -> dict[str, Any]:
        return {
            'world_size': self._collective.world_size,
            'writer': self._options.writer,
            'dtype': self._options.dtype or 'as trained',
            **self._options.facts,
        }
