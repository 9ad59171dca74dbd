"""The plan of a live model's saves, and what it is made from."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xhf_hooks.errors import ModelError, PlanError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.exporters.base import Export, Exporter, ExportRequest, names_left_out, names_read_by
from xhf_hooks.format.text import counted, some
from xhf_hooks.model import module_tensors
from xhf_hooks.options import SaveOptions
from xhf_hooks.planning.checks import require_entries, require_specs, require_spreads
from xhf_hooks.planning.masters import specs_with_masters
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.planner import describe_plan, make_plan
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.ranks.compare_ranks import require_same
from xhf_hooks.runs.telemetry import RunLog, warn_of_left_out
from xhf_hooks.runs.unwrap import Unwrapped
from xhf_hooks.sources import Source
from xhf_hooks.system.files import allow_open_files
from xhf_hooks.system.library_settings import without_garbage_collector

#: Memory for writing slices: parts on their way to the disk, and a buffer for direct I/O (sources/, writers/).
_SLICES_NBYTES = 32 * 10**6


@dataclass(frozen=True)
class Preparation:
    """The plan of a model's saves, and what it was made from.

    Attributes:
        export: What the exporter writes in each save.
        specs: The model's tensors. A save plans again if the model has other tensors by then.
        expected_extra_nbytes: Estimated memory of a save on the busiest rank.
    """

    exporter: Exporter[Any]
    export: Export
    specs: list[TensorSpec]
    plan: SavePlan
    expected_extra_nbytes: int

    @cached_property
    def left_out(self) -> list[str]:
        """The tensors of the source that the exporter writes nothing of."""
        return names_left_out(self.specs, self.export.entries)


@without_garbage_collector()
def prepare_saves(
    unwrapped: Unwrapped,
    source: Source,
    options: SaveOptions,
    strategy: WriteStrategy,
    collective: Collective,
    log: RunLog,
) -> Preparation:
    """Plan saves from metadata alone, and compare the plan across ranks. Runs on: all ranks.

    Raises:
        AgreedError: The model cannot be exported; the message has the reason.
        RanksDifferError: Ranks hold different models.
    """
    bucket_nbytes = options.bucket_nbytes
    with collective.stage('plan'):
        exporter = exporter_for(
            unwrapped.model,
            options.module,
            options.carry_base,
            lora=options.lora,
            llava_format=options.llava_format,
        )
        source_name, exporter_name = type(source).__name__, type(exporter).__name__
        specs = source.specs()
        require_specs(specs, f'{source_name}.specs()')
        try:
            export = exporter.export(
                ExportRequest(specs, options.dtype, options.carry_base, unwrapped.run_config or {}, unwrapped.model)
            )
        except ModelError as error:
            raise ModelError(f'{error} ({source_name} read the names and shapes for {exporter_name})') from error
        if not isinstance(export, Export):
            raise PlanError(f'{exporter_name}.export(): expected an Export, found {type(export).__name__}')
        entries = export.entries
        require_entries(entries, specs, f'{exporter_name}.export()')
        read_names = names_read_by(entries)
        _require_values(unwrapped, read_names)
        planned_specs = specs_with_masters(specs, entries, options.dtype)
    with collective.stage('plan'):  # ranks may exchange what they have
        spread = source.spread(planned_specs, collective)
        require_spreads(spread, planned_specs, collective.world_size, f'{source_name}.spread()')
    with collective.stage('plan'):
        reads_masters = any(spec.from_master for spec in planned_specs)
        # Trained 16-bit weights of which no master was found. Where the source does not refuse them, there is a warning
        # (below)
        lost = [spec.name for spec in planned_specs if spec.master_lost and spec.name in read_names]
        widened = lost if options.dtype == 'F32' else []
        source.require_masters_readable(unwrapped.engine, are_read=reads_masters, are_missing=bool(widened))
        if reads_masters:
            source.require_masters_match_weights(planned_specs)
        source.require_readable(read_names)
        round_nbytes = max(1, bucket_nbytes // 2)  # half a bucket keeps the buffers to send and receive small
        plan = make_plan(
            entries,
            planned_specs,
            max_shard_nbytes=options.max_shard_nbytes,
            bucket_nbytes=bucket_nbytes,
            n_parameters=export.n_parameters,
            strategy=strategy,
            world_size=collective.world_size,
            spread=spread,
            # In the background, so that each rank copies less while training waits. In the foreground the owner's own
            # replica is cheaper than shares that it receives
            send_shares_of_replicas=options.async_save,
            round_nbytes=round_nbytes,
        )
        allow_open_files(len(plan.files), f'{len(plan.files)} files of weights; a larger max_shard_size makes fewer')
    require_same(collective, 'the save plan', plan.digest, lambda: describe_plan(plan))
    with collective.stage('check loading'):
        notes = exporter.check_loading(export, plan.placements) if collective.rank == 0 else []
        for note in notes:
            log.info(note)
        if widened:
            log.warning(
                f'float32: no fp32 master weights were found of {counted(len(widened), "trained 16-bit tensor")} '
                f'({some(widened)}); their 16-bit weights are widened'
            )
        # `memory_factor`: how many times the size of a bucket its gather needs
        gathered_nbytes = source.memory_factor * plan.largest_bucket_nbytes + export.combine_nbytes
        # Five buffers of one round each: two to send from (together one bucket), and three to receive into, of which
        # one fills while two wait for the disk
        round_buffers_nbytes = bucket_nbytes + 3 * round_nbytes if plan.rounds else 0
        extra_nbytes = max(gathered_nbytes, round_buffers_nbytes) + (_SLICES_NBYTES if plan.in_place else 0)
        preparation = Preparation(exporter, export, specs, plan, extra_nbytes)
        warn_of_left_out(log, preparation.left_out, unwrapped.model)
    return preparation


def _require_values(unwrapped: Unwrapped, read_names: Set[str]) -> None:
    """Refuse tensors on the meta device.

    Raises:
        ModelError: It names them.
    """
    empty = [name for name, tensor in module_tensors(unwrapped.root) if tensor.is_meta and name in read_names]
    if empty:
        raise ModelError(
            f'{counted(len(empty), "tensor")} on the meta device, which have no values: {some(empty, 5)}. device_map '
            f'puts layers there that it offloads: load the model without device_map, or with one for devices alone'
        )
