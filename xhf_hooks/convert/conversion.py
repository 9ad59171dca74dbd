"""The flow of a conversion: that of :mod:`xhf_hooks.saves.save`, without ranks.

CheckpointSource        the tensors in the files           names and shapes, no data
MetaModel               the trained model                  on the meta device, no data
Exporter.export()      exported tensors and their names   the same exporters as the hook
make_plan()             the place of each byte
write_weights()         slices are read, cast and written  by several threads, a block each
commit()                staging gets the final name
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from xhf_hooks.assets.find_tokenizer import find_tokenizer_of_checkpoint
from xhf_hooks.base_model.files import PROCESSOR_FILES, TOKENIZER_CONFIG, base_dirs_of
from xhf_hooks.compat.peft import edits_base_again
from xhf_hooks.convert.outputs import PlannedOutputs
from xhf_hooks.convert.weights import write_weights
from xhf_hooks.errors import CheckpointError, OptionError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.exporters.base import ExportRequest
from xhf_hooks.exporters.find_model import adapters_in, pretrained_in
from xhf_hooks.exporters.model_card import write_model_card
from xhf_hooks.exporters.xtuner.chat_template import tokenizer_for_run
from xhf_hooks.format.dtypes import is_float
from xhf_hooks.format.text import counted, engine_text, size_text, some
from xhf_hooks.meta_model import RunConfig, build_meta_model, find_run_config, match_checkpoint
from xhf_hooks.meta_model.frozen import dtype_of_frozen, edited_by_adapters, frozen_in
from xhf_hooks.meta_model.match import Match, require_all
from xhf_hooks.meta_model.other_modules import add_other_modules
from xhf_hooks.meta_model.stored_names import name_as_in_model
from xhf_hooks.meta_model.trainer_files import (
    adapter_of_trainer,
    config_folder,
    folder_of_trainer_files,
    frozen_only,
    is_save_of_hook,
)
from xhf_hooks.model import token_embeddings
from xhf_hooks.options import VerifyLevel
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.masters import specs_with_masters
from xhf_hooks.planning.plan import WrittenSave
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import CommittedCheckpoint, SaveCost, Step
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.sources.checkpoint import CheckpointSource
from xhf_hooks.sources.host_memory import MemoryMeter
from xhf_hooks.sources.stored_tensors import StoredTensor
from xhf_hooks.system.files import errors_naming
from xhf_hooks.writers.tally import warn_of_non_finite


@dataclass(frozen=True)
class ConvertOptions:
    """The options of ``xhf-convert``, parsed.

    Attributes:
        ema: Export the averaged weights if the checkpoint holds both averaged and live ones.
        dtype: Safetensors dtype of floating-point tensors. Another one than in training is cast once from the fp32
            master weights, where there are any. AS_IN_BASE: each as in the base model's files. None: the training
            dtype, bit for bit what the hook saves.
        model_card: Write a model card into a folder that would have none.
        verify: What is checked before the commit, as in the hook's option; 'full' reads every byte back.
    """

    config: Path | None = None
    base: str | None = None
    module: str | None = None
    architecture: str | None = None
    lora: str | None = None
    llava_format: str | None = None
    ema: bool = True
    dtype: str | None = None
    max_shard_nbytes: int = 5 * 10**9
    workers: int = 1
    verify: VerifyLevel = 'sizes'
    trust_remote_code: bool = False
    carry_base: str | None = None
    model_card: bool = True


class Conversion:
    """The conversion of one checkpoint. Runs on: one process.

    Attributes:
        outputs: The tensors that :meth:`run` writes.
        warnings: Notes for the user before anything is written.

    Raises:
        XhfError: The checkpoint cannot be converted. Nothing was written.
    """

    def __init__(self, checkpoint: CheckpointSource, options: ConvertOptions) -> None:
        self._checkpoint, self._options = checkpoint, options
        found = checkpoint.found
        named = name_as_in_model(checkpoint.tensors.values(), checkpoint.trained, Path(options.base or '').name)
        stored, trainer_files = _by_name(named.tensors), adapter_of_trainer(found)
        self._config, config_notes = find_run_config(options.config, checkpoint.config_text, found.path)
        self._meta_model = build_meta_model(
            self._config,
            found,
            {**trainer_files, **stored},
            base=options.base,
            module=options.module,
            architecture=options.architecture,
            trained=named.trained,
            notes=config_notes,
            trust_remote_code=options.trust_remote_code,
        )
        module = self._meta_model.module
        stored |= _by_name(frozen_only(module, trainer_files, stored.keys()))
        dtype = self._dtype_of_frozen(stored)
        notes_on_others = add_other_modules(module, stored, named.trained)
        match = match_checkpoint(self._meta_model, stored, dtype)
        _forget_quantizers(module, stored)
        self._exporter = exporter_for(
            module,
            options.module,
            options.carry_base,
            lora=options.lora,
            llava_format=options.llava_format,
        )
        self._weights, weights_notes = _which_weights(checkpoint, self._config, options.ema)
        fields = {} if self._config is None else self._config.fields
        request = ExportRequest(match.specs, options.dtype, options.carry_base, fields, module)
        self._export = self._exporter.export(request)
        self.outputs = self._plan(match)
        plan = self.outputs.plan
        read = {spec.name for spec in plan.reads}
        require_all(match, read, self._meta_model, checkpoint.not_tensors)
        self._widened = sum(spec.master_lost for spec in plan.reads) if options.dtype == 'F32' else 0
        if self._widened and checkpoint.has_unnamed_masters:
            raise CheckpointError(
                f'{found.path}: --dtype float32: at stage 0, DeepSpeed saves fp32 master weights without names ('
                f'fp32_groups of FP16_UnfusedOptimizer or FP16_Optimizer), so they cannot be told apart. '
                f'Leave the option out'
            )
        if not match.lent.keys().isdisjoint(read):
            self._meta_model.over_base.require_readable()
        of_base = _by_name(match.tensors[name] for name in match.lent)
        self.warnings = [*checkpoint.warnings, *weights_notes, *named.notes, *match.notes, *match.notes_on_lent(read)]
        self.warnings += [*notes_on_others, *self._exporter.notes]
        self.warnings += self._judge_frozen(of_base, is_dtype_known=dtype is not None)
        self.warnings += self._judge_adapters()
        self.warnings += self._judge_quantized([name for name in match.lent if name in named.quantized & read])
        self.warnings += self._exporter.check_loading(self._export, plan.placements)
        if self._meta_model.has_config_of_base and not all(file.is_of_adapter for file in plan.files):
            bases = ' and '.join(base.folder for base in self._meta_model.bases)
            self.warnings.append(
                f'config.json is that of {bases}: no file of this run has what training set in it, such as '
                f'label names, RoPE, the context length or pad_token_id'
            )
        silent = {*match.lacking, *self._export.adapter_base_tensors}
        if left_out := [name for name in self._export.left_out if name not in silent]:
            self.warnings.append(f'not exported: {len(left_out)} tensors ({some(left_out)})')

    def _dtype_of_frozen(self, stored: Mapping[str, StoredTensor]) -> str | None:
        """The dtype that training gave to weights of the base; None if that is not known."""
        module = self._meta_model.module
        if self._checkpoint.trained_dtype is not None or not adapters_in(module):
            return self._checkpoint.trained_dtype
        return dtype_of_frozen(self._config, stored, frozen_in(module, stored))

    def _judge_frozen(self, of_base: Mapping[str, StoredTensor], *, is_dtype_known: bool) -> list[str]:
        """Notes on weights of the base that training had otherwise.

        Args:
            of_base: The tensors that the checkpoint lacks, by each of their names.

        Raises:
            OptionError: They are to be merged, and are not those of training.
        """
        module = self._meta_model.module
        bases = ' and '.join(base.folder for base in self._meta_model.bases)
        reads = self.outputs.plan.reads
        read = of_base.keys() & {name for spec in reads for name in (spec.name, *spec.aliases)}
        edited = {name: init for name, init in edited_by_adapters(module) if name in of_base}
        init = next(iter(edited.values()), None)
        if read & edited.keys():
            raise OptionError(
                'lora',
                f"'adapter', because init_lora_weights={init!r} changed the base's weights before training, and the "
                f'checkpoint does not have them: with peft, load the adapter onto {bases} and merge it',
                self._options.lora,
            )
        notes = []
        if edited and edits_base_again(init):  # else the adapter's exporter warns
            notes.append(
                f'init_lora_weights={init!r} changed the weights of {bases} before training, and does so again when '
                f'peft loads the adapter: it needs this base, unchanged'
            )
        if adapters_in(module) and read and not is_dtype_known and self._options.dtype is None:
            dtypes = sorted({of_base[name].dtype for name in read})
            notes.append(
                f'the dtype of the frozen weights during training is unknown: they are merged as they are in {bases} '
                f'({", ".join(dtypes)}); choose another one with --dtype'
            )
        return notes

    def _judge_adapters(self) -> list[str]:
        """Notes on adapters that are written without the weights on which they were trained."""
        if not any(file.is_of_adapter for file in self.outputs.plan.files):
            return []
        bases = ' and '.join(base.folder for base in self._meta_model.bases)
        return self._meta_model.over_base.notes_on_adapters(self._meta_model.module, bases)

    def _judge_quantized(self, replaced: Sequence[str]) -> list[str]:
        """A note on weights that training had quantized, and that are written as the given base has them.

        Args:
            replaced: Names of these weights.

        Raises:
            OptionError: No base was given for them.
        """
        if not replaced:
            return []
        problem = f'training had {counted(len(replaced), "weight")} quantized ({some(replaced)})'
        if self._options.base not in [base.folder for base in self._meta_model.bases]:
            expected = (
                f"'adapter', because {problem}; to merge the adapter into others, give them with --base UNQUANTIZED"
            )
            raise OptionError('lora', expected, self._options.lora)
        return [f'{problem}; the adapter is merged into those of {self._options.base}, which differ by rounding']

    def _plan(self, match: Match) -> PlannedOutputs:
        plan = make_plan(
            self._export.entries,
            specs_with_masters(match.specs, self._export.entries, self._options.dtype),
            max_shard_nbytes=self._options.max_shard_nbytes,
            bucket_nbytes=1,
            n_parameters=self._export.n_parameters,
            strategy=WriteStrategy.POSITIONAL,
        )
        return PlannedOutputs(plan, match.tensors)

    @property
    def step(self) -> Step:
        """The step of the checkpoint; iteration 0 if unknown."""
        iteration, epoch = self._checkpoint.iteration or 0, self._checkpoint.epoch
        if epoch is not None and self._checkpoint.found.path.name.startswith('epoch_'):
            return Step('epoch', epoch, iteration)
        return Step.of_iteration(iteration)

    def description(self) -> list[str]:
        """The model and what will be written, as text."""
        plan = self.outputs.plan
        return [
            f'model {self._meta_model.described_by}; {type(self._exporter).__name__}',
            f'to write: {len(plan.placements)} tensors, {size_text(plan.nbytes)} in '
            f'{some([file.name for file in plan.files])}; to read: {size_text(self.outputs.read_nbytes)}',
            *self._notes_on_float32(),
        ]

    def _notes_on_float32(self) -> list[str]:
        if not self._widened:
            return []
        return [
            f'float32: {self._widened} of {len(self.outputs.plan.reads)} tensors have no fp32 master weights in this '
            f'checkpoint; their 16-bit weights are widened'
        ]

    def run(self, out: Path, on_progress: Callable[[int, int], None], *, overwrite: bool) -> CommittedCheckpoint:
        """Write and commit. Libraries may print content of the tokenizer's files.

        Args:
            overwrite: Whether ``out`` may be replaced. Another conversion may have written it in the meantime.
            on_progress: Called in this thread with bytes done and total bytes.

        Raises:
            XhfError, OSError: It failed; ``out`` is unchanged.
        """
        options, plan = self._options, self.outputs.plan
        tokenizer, eos_token_ids, notes = self._find_tokenizer()
        target = CheckpointFolder(out.absolute(), max_keep=-1, elsewhere='give as OUT', warn=notes.append)
        bases = [*base_dirs_of(self._meta_model.module), *filter(None, [options.base])]
        target.prepare(bases, may_replace=overwrite, remedy=', or add --overwrite')
        started, meter = time.perf_counter(), MemoryMeter()
        try:
            staging = target.open_staging()
            target.require_disk_space(plan.nbytes)
            with errors_naming(target.path):
                notes += self._exporter.write_hf_assets(self._export, staging, tokenizer, eos_token_ids)
                if options.model_card:
                    write_model_card(staging, self._exporter.base_model, self.step)
            tally = write_weights(staging, self.outputs, workers=options.workers, meter=meter, on_progress=on_progress)
            tensors = tally.written()
            with errors_naming(target.path):
                save = WrittenSave(plan, tensors, self.step, self._manifest_fields())
                target.commit(save, options.verify)
        finally:  # including signals
            target.abort()
            target.unlock()
        seconds = time.perf_counter() - started
        cost = SaveCost(plan.nbytes, seconds, seconds, meter.peak_extra_nbytes)
        notes += [*warn_of_non_finite(tensors), *self._notes_on_float32()]
        return CommittedCheckpoint(target.path, target.name, self.step, cost, tuple(notes))

    def write_assets(self, folder: Path) -> None:
        """Write the files that :meth:`run` writes beside the weights, for comparing them.

        Raises:
            XhfError, OSError: It failed.
        """
        tokenizer, eos_token_ids, _ = self._find_tokenizer()
        self._exporter.write_hf_assets(self._export, folder, tokenizer, eos_token_ids)

    def options_shown_by(self, shown: Mapping[str, str]) -> dict[str, str]:
        """The options that the user left open and that apply to this model.

        Args:
            shown: Values of ``lora`` and ``llava_format`` that a folder shows, with which it is to be compared.
        """
        applying = set(self._exporter.options)
        if not adapters_in(self._meta_model.module):
            applying.discard('lora')
        return {name: value for name, value in shown.items() if name in applying and not getattr(self._options, name)}

    def _find_tokenizer(self) -> tuple[Any | None, Sequence[int], list[str]]:
        """The tokenizer to write, the EOS token ids of answers, and notes for the user."""
        config, module, found = self._config, self._meta_model.module, self._checkpoint.found
        save = config_folder(found)
        embeddings = [weight for part in pretrained_in(module).values() for weight in token_embeddings(part)]
        tokenizer, notes = find_tokenizer_of_checkpoint(
            self._exporter,
            beside=folder_of_trainer_files(found, TOKENIZER_CONFIG, *PROCESSOR_FILES),
            recipe=config and config.fields.get('tokenizer'),
            config=config.where if config else '',
            base=self._options.base,
            newest_save=save if save is not None and is_save_of_hook(save) else None,
            n_rows=max((weight.shape[0] for weight in embeddings), default=None),
            trust_remote_code=self._options.trust_remote_code,
        )
        if tokenizer is None:
            return None, (), notes
        try:
            fields = {} if self._config is None else self._config.fields
            tokenizer, eos_token_ids, messages = tokenizer_for_run(tokenizer, fields, may_import=False)
        except OptionError as error:
            return tokenizer, (), [*notes, f'the chat template of training was not written: {error}']
        return tokenizer, eos_token_ids, [*notes, *messages]

    def _manifest_fields(self) -> dict[str, Any]:
        """The manifest's fields besides the files."""
        dtype = self._options.dtype or 'as trained'
        fields = {'dtype': dtype, **self._checkpoint.manifest_fields, 'weights': self._weights}
        return {**fields, 'widened_tensors': self._widened} if self._widened else fields


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


def describe_checkpoint(source: CheckpointSource) -> list[str]:
    """Lines about the content of a checkpoint, and about statements that its files cannot prove."""
    specs, fields = source.specs(), source.manifest_fields
    iteration = 'unknown' if source.iteration is None else source.iteration
    details = [f'{n} {dtype}' for dtype, n in Counter(spec.dtype for spec in specs).items()]
    details += [f'the {fields["weights"]} weights'] if source.averages else []
    return [
        f'found {source.found.path}: {fields["layout"]}, {engine_text(fields)}, iteration {iteration}, '
        f'{counted(len(specs), "tensor")} ({", ".join(details)}), {size_text(source.found.nbytes)}',
        *source.unproven,
    ]


def _which_weights(checkpoint: CheckpointSource, config: RunConfig | None, ema: bool) -> tuple[str, list[str]]:
    """'averaged' or 'live', and notes for the user.

    Raises:
        OptionError: Live weights are requested, but the checkpoint has none.
    """
    weights = checkpoint.manifest_fields['weights']
    if checkpoint.averages or config is None or not config.averages:
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
