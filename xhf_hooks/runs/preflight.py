"""What is locked, checked and logged before training, so that saves will work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xhf_hooks.exporters.assets.base_files import base_dirs_of
from xhf_hooks.exporters.assets.find_tokenizer import find_tokenizer, tokenizer_for_run
from xhf_hooks.exporters.other_modules import OTHER_FILES, is_of_other_modules
from xhf_hooks.format.index import WEIGHTS_NAME
from xhf_hooks.format.text import counted, some
from xhf_hooks.options import CallOptions, RunOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.runs.access import lock_targets
from xhf_hooks.runs.ends.upload import Uploads
from xhf_hooks.runs.run_info import RunInfo
from xhf_hooks.runs.save_context import SaveContext
from xhf_hooks.runs.telemetry import table, trained_of
from xhf_hooks.sources.send import Snapshot
from xhf_hooks.system.files import errors_naming


def preflight(
    context: SaveContext,
    targets: Sequence[CheckpointFolder],
    uploads: Uploads | None,
    info: RunInfo,
) -> None:
    """Lock targets, find the tokenizer, try uploads, host memory and writing the HF assets. Runs on: all ranks.

    Args:
        targets: Where saves go; the first is the target of the newest save.
        info: What the frontend knows of the run.

    Raises:
        AgreedError: Saves will not work.
    """
    collective, log = context.collective, context.log
    with collective.stage('preflight'):
        if collective.rank == 0:
            lock_targets(
                log,
                targets,
                context.plan.nbytes,
                base_dirs_of(info.unwrapped.model),
                remove_leftovers_in=info.remove_leftovers_in,
                may_replace=info.may_replace,
            )
            if not context.is_planned_before:
                _find_tokenizer(context, info.tokenizer)
                for warning in _write_assets_on_trial(context, targets[0]):
                    log.warn_once(warning)
        if uploads is not None:
            uploads.require_usable()
    if context.background is not None and not context.is_planned_before:
        with collective.stage('preflight'):
            reserved_nbytes = reserve_snapshot(context)
        log.info(f'background saves use {reserved_nbytes / 1e6:.0f} MB of host memory on this rank')


def reserve_snapshot(context: SaveContext) -> int:
    """Run a trial snapshot, so that memory shortages surface before training; returns its bytes on this rank."""
    Snapshot.take(context.plan, context.source, context.memory, context.collective)
    return context.memory.nbytes


def _find_tokenizer(context: SaveContext, of_the_run: Any | None) -> None:
    unwrapped, exporter = context.unwrapped, context.preparation.exporter
    tokenizer, warnings = find_tokenizer(context.options.tokenizer, of_the_run, exporter, unwrapped.model)
    for warning in warnings:
        context.log.warning(warning)
    context.tokenizer, context.eos_token_ids, messages = tokenizer_for_run(tokenizer, unwrapped.run_config or {})
    for message in messages:
        context.log.info(message)


def _write_assets_on_trial(context: SaveContext, target: CheckpointFolder) -> list[str]:
    """Write the HF assets to the target and remove them again; returns warnings for the log."""
    try:
        with errors_naming(target.path):
            return context.write_hf_assets(target.open_staging())
    finally:
        target.abort()


def log_preparations(context: SaveContext, targets: Sequence[CheckpointFolder], occasions: Sequence[str]) -> None:
    """Log what will be saved, where, when and how, and what is left out. Fits a terminal of 100 columns."""
    log, plan, export = context.log, context.plan, context.preparation.export
    n_tensors, n_files = len(plan.placements), len(plan.files)
    how = f'{context.strategy.value} writer{", in the background" if context.background is not None else ""}; at most '
    how += f'{context.preparation.expected_extra_nbytes / 1e6:.0f} MB of extra memory per rank'
    rows = {
        'what': f'{counted(n_tensors, "tensor")}, {plan.nbytes / 1e6:.1f} MB in {counted(n_files, "file")}',
        'from': f'{type(context.source).__name__}, for {type(context.preparation.exporter).__name__}',
        'where': targets[0].path,
        'when': ', '.join(occasions),
        'how': how,
    }
    log.info(table('ready to save', rows))
    gathered = list(dict.fromkeys(spec.name for group in plan.gathered for spec in group.reads))
    if gathered and context.strategy.reads_slices and context.collective.world_size > 1:
        log.info(f'gathered, not saved in slices: {counted(len(gathered), "tensor")} ({some(gathered)})')
    if plan.copied:
        copied = [one.placement.hf_name for one in plan.copied]
        log.info(f'copied from the base model: {counted(len(copied), "tensor")} ({some(copied)})')
    others = [one.hf_name for one in plan.placements if is_of_other_modules(one.file)]
    if others:
        log.info(
            f'trained outside of the exported model: {counted(len(others), "tensor")} ({some(others)}), saved to '
            f'{OTHER_FILES.path(WEIGHTS_NAME)}'
        )
    left_out = context.preparation.left_out
    told_otherwise = {*trained_of(left_out, context.unwrapped.model), *export.adapter_base_tensors}
    left_out = [name for name in left_out if name not in told_otherwise]
    if left_out:
        log.info(f'not exported: {counted(len(left_out), "tensor")} ({some(left_out)})')
    for note in context.preparation.exporter.notes:
        log.info(note)


def occasions_of(
    options: RunOptions | CallOptions, schedule: str | None, extra_targets: Mapping[str, CheckpointFolder]
) -> list[str]:
    """Everything that triggers a save, for the log."""
    found = [] if schedule is None else [schedule]
    if options.save_at:
        found.append(f'at iterations {some([*map(str, options.save_at)])}')
    if options.interval_minutes is not None:
        found.append(f'{options.interval_minutes:g} minutes after the last save')
    if options.save_last:
        found.append('at the end of training')
    found += [f'at a new best score ({target.name})' for target in extra_targets.values()]
    if options.save_on_signal:
        found.append(f'on {" or ".join(options.save_on_signal)}')
    return found
