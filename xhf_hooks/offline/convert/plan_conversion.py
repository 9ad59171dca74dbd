"""Plans a conversion: the trained model, what is written of it, and what the user has to know. Reads no weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import nn

from xhf_hooks.compat.peft import edits_base_again
from xhf_hooks.errors import CheckpointError, OptionError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.exporters.base import ExportRequest, names_left_out
from xhf_hooks.exporters.find_model import adapters_in
from xhf_hooks.format.dtypes import is_float
from xhf_hooks.format.text import counted, some
from xhf_hooks.offline.checkpoint.source import CheckpointSource
from xhf_hooks.offline.convert.conversion import Conversion, ConvertOptions
from xhf_hooks.offline.convert.weights import PlannedOutputs
from xhf_hooks.offline.model.build import build_meta_model
from xhf_hooks.offline.model.freeze_modules import dtype_of_frozen, edited_by_adapters
from xhf_hooks.offline.model.match_checkpoint import match_checkpoint, require_all
from xhf_hooks.offline.model.meta_model import MetaModel
from xhf_hooks.offline.model.other_modules import add_other_modules
from xhf_hooks.offline.model.run_config import RunConfig, find_run_config
from xhf_hooks.offline.model.stored_names import name_as_in_model
from xhf_hooks.offline.model.trainer_files import adapter_of_trainer, frozen_only
from xhf_hooks.planning.checks import require_entries
from xhf_hooks.planning.masters import specs_with_masters
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.sources.stored_tensors import StoredTensor


def plan_conversion(checkpoint: CheckpointSource, options: ConvertOptions) -> Conversion:
    """Plan the conversion of a checkpoint.

    Args:
        checkpoint: What to convert.
        options: The options of the command.

    Raises:
        XhfError: The checkpoint cannot be converted. Nothing was written.
    """
    found = checkpoint.found
    named = name_as_in_model(checkpoint.tensors.values(), checkpoint.trained, Path(options.base or '').name)
    stored, trainer_files = _by_name(named.tensors), adapter_of_trainer(found)
    config, config_notes = find_run_config(options.config, checkpoint.config_text, found.path)
    meta_model = MetaModel(
        stored={**trainer_files, **stored},
        trust_remote_code=options.trust_remote_code,
        path=options.module,
        architecture=options.architecture,
        trained=named.trained,
        notes=config_notes,
    )
    build_meta_model(meta_model, config, found, options.base)
    module = meta_model.module
    stored |= _by_name(frozen_only(module, trainer_files, stored.keys()))
    dtype = dtype_of_frozen(module, config, stored, checkpoint.trained_dtype)
    notes_on_others = add_other_modules(module, stored, named.trained)
    match = match_checkpoint(meta_model, stored, dtype)
    _forget_quantizers(module, stored)
    exporter = exporter_for(
        module, options.module, options.carry_base, lora=options.lora, llava_format=options.llava_format
    )
    weights, weights_notes = _which_weights(checkpoint, config, options.ema)
    export = exporter.export(ExportRequest(match.specs, options.dtype, options.carry_base, config.fields, module))
    require_entries(export.entries, match.specs, f'{type(exporter).__name__}.export()')
    plan = make_plan(
        export.entries,
        specs_with_masters(match.specs, export.entries, options.dtype),
        max_shard_nbytes=options.max_shard_nbytes,
        bucket_nbytes=1,
        n_parameters=export.n_parameters,
        strategy=WriteStrategy.POSITIONAL,
    )
    read = {spec.name for spec in plan.reads}
    require_all(match, read, meta_model, checkpoint.not_tensors)
    n_widened = sum(spec.master_lost for spec in plan.reads) if options.dtype == 'F32' else 0
    if n_widened and checkpoint.has_unnamed_masters:
        raise CheckpointError(
            f'{found.path}: --dtype float32: at stage 0, DeepSpeed saves fp32 master weights without names ('
            f'fp32_groups of FP16_UnfusedOptimizer or FP16_Optimizer), so they cannot be told apart. '
            f'Leave the option out'
        )
    if not match.lent.keys().isdisjoint(read):
        meta_model.over_base.require_readable()
    of_base = _by_name(match.tensors[name] for name in match.lent)
    quantized = [name for name in match.lent if name in named.quantized & read]
    silent = {*match.lacking, *export.adapter_base_tensors}
    left_out = [name for name in names_left_out(match.specs, export.entries) if name not in silent]
    warnings = [
        *(*checkpoint.warnings, *weights_notes, *named.notes, *match.notes, *match.notes_on_lent(read)),
        *(*notes_on_others, *exporter.notes),
        *_judge_frozen(meta_model, plan, of_base, options, is_dtype_known=dtype is not None),
        *_judge_quantized(meta_model, quantized, options),
        *exporter.check_loading(export, plan.placements),
        *_notes_on_base(meta_model, plan),
        *([f'not exported: {counted(len(left_out), "tensor")} ({some(left_out)})'] if left_out else []),
    ]
    return Conversion(
        checkpoint=checkpoint,
        options=options,
        run_config=config,
        meta_model=meta_model,
        exporter=exporter,
        export=export,
        outputs=PlannedOutputs(plan, match.tensors),
        weights=weights,
        n_widened=n_widened,
        warnings=warnings,
    )


def _by_name(tensors: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    return {name: tensor for tensor in tensors for name in (tensor.name, *tensor.aliases)}


def _forget_quantizers(module: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """A base's config may name a quantizer that training did without: then the checkpoint has all its weights."""
    floats = {name for name, tensor in stored.items() if is_float(tensor.dtype)}
    for path, part in module.named_modules():
        if hasattr(getattr(part, 'config', None), 'quantization_config'):
            names = (f'{path}.{name}'.removeprefix('.') for name, _ in part.named_parameters())
            if floats.issuperset(names):
                del part.config.quantization_config


def _which_weights(checkpoint: CheckpointSource, config: RunConfig, ema: bool) -> tuple[str, list[str]]:
    """'averaged' or 'live', and notes for the user.

    Args:
        config: The config of the run.
        ema: The option of that name.

    Raises:
        OptionError: Live weights are requested, but the checkpoint has none.
    """
    weights = checkpoint.manifest_fields['weights']
    if checkpoint.averages or not config.averages:
        return weights, []
    if checkpoint.found.layout == 'file' and not config.uses_deepspeed:  # published without resume state
        if not ema:
            raise OptionError('--no-ema', 'a checkpoint with the ema_state_dict of its run', checkpoint.found.path.name)
        return 'averaged', []
    note = (
        'the run averages its weights (EMAHook), but DeepSpeed checkpoints hold the live weights only; these are '
        'converted. The averaged weights are in hf_model if the run had HFCheckpointHook'
    )
    return weights, [note] if ema else []


def _judge_frozen(
    meta_model: MetaModel,
    plan: SavePlan,
    of_base: Mapping[str, StoredTensor],
    options: ConvertOptions,
    *,
    is_dtype_known: bool,
) -> list[str]:
    """Notes on weights of the base that training had otherwise.

    Args:
        plan: What is written.
        of_base: The tensors that the checkpoint lacks, by each of their names.
        options: The options of the command.
        is_dtype_known: Whether it is known which dtype training gave them.

    Raises:
        OptionError: They are to be merged, and are not those of training.
    """
    module, bases = meta_model.module, meta_model.base_folders
    read = of_base.keys() & {name for spec in plan.reads for name in (spec.name, *spec.aliases)}
    edited = {name: init for name, init in edited_by_adapters(module) if name in of_base}
    init = next(iter(edited.values()), None)
    if read & edited.keys():
        raise OptionError(
            'lora',
            f"'adapter', because init_lora_weights={init!r} changed the base's weights before training, and the "
            f'checkpoint does not have them: with peft, load the adapter onto {bases} and merge it',
            options.lora,
        )
    notes = []
    if edited and edits_base_again(init):  # else the adapter's exporter warns
        notes.append(
            f'init_lora_weights={init!r} changed the weights of {bases} before training, and does so again when '
            f'peft loads the adapter: it needs this base, unchanged'
        )
    if adapters_in(module) and read and not is_dtype_known and options.dtype is None:
        dtypes = sorted({of_base[name].dtype for name in read})
        notes.append(
            f'the dtype of the frozen weights during training is unknown: they are merged as they are in {bases} '
            f'({", ".join(dtypes)}); choose another one with --dtype'
        )
    return notes


def _judge_quantized(meta_model: MetaModel, replaced: Sequence[str], options: ConvertOptions) -> list[str]:
    """A note on weights that training had quantized, and that are written as the given base has them.

    Args:
        replaced: Names of these weights.
        options: The options of the command.

    Raises:
        OptionError: No base was given for them.
    """
    if not replaced:
        return []
    problem = f'training had {counted(len(replaced), "weight")} quantized ({some(replaced)})'
    if options.base not in [base.folder for base in meta_model.bases]:
        expected = f"'adapter', because {problem}; to merge the adapter into others, give them with --base UNQUANTIZED"
        raise OptionError('lora', expected, options.lora)
    return [f'{problem}; the adapter is merged into those of {options.base}, which differ by rounding']


def _notes_on_base(meta_model: MetaModel, plan: SavePlan) -> list[str]:
    """Notes on what is written without the weights or the config of the run.

    Args:
        plan: What is written.
    """
    notes, bases = [], meta_model.base_folders
    if any(file.is_of_adapter for file in plan.files):
        notes += meta_model.over_base.notes_on_adapters(meta_model.module, bases)
    if meta_model.has_config_of_base and not all(file.is_of_adapter for file in plan.files):
        notes.append(
            f'config.json is that of {bases}: no file of this run has what training set in it, such as label names, '
            f'RoPE, the context length or pad_token_id'
        )
    return notes
