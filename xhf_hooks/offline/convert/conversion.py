"""The flow of a conversion: that of :mod:`xhf_hooks.runs.save`, without ranks.

CheckpointSource        the tensors in the files           names and shapes, no data
plan_conversion():
  build_meta_model()    the trained model                  on the meta device, no data
  Exporter.export()     exported tensors and their names   the same exporters as the hook
  make_plan()           the place of each byte
Conversion.run():
  write_weights()       slices are read, cast and written  by several threads, a block each
  commit()              staging gets the final name
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.errors import OptionError
from xhf_hooks.exporters.assets.base_files import base_dirs_of
from xhf_hooks.exporters.assets.find_tokenizer import find_tokenizer_of_checkpoint, tokenizer_for_run
from xhf_hooks.exporters.base import Export, Exporter
from xhf_hooks.exporters.find_model import adapters_in, pretrained_in
from xhf_hooks.exporters.model_card import write_model_card
from xhf_hooks.files.tally import warn_of_non_finite
from xhf_hooks.format.loaded_files import PROCESSOR_FILES, TOKENIZER_CONFIG
from xhf_hooks.format.text import counted, engine_text, size_text, some
from xhf_hooks.model import token_embeddings
from xhf_hooks.offline.checkpoint.source import CheckpointSource
from xhf_hooks.offline.convert.weights import PlannedOutputs, write_weights
from xhf_hooks.offline.model.meta_model import MetaModel
from xhf_hooks.offline.model.run_config import RunConfig
from xhf_hooks.offline.model.trainer_files import (
    config_folder,
    folder_of_trainer_files,
    is_save_of_hook,
)
from xhf_hooks.options import VerifyLevel
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.plan import WrittenSave
from xhf_hooks.planning.types import CommittedCheckpoint, SaveCost, Step
from xhf_hooks.sources.host_memory import MemoryMeter
from xhf_hooks.system.files import errors_naming


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


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The conversion of one checkpoint, as :func:`.plan_conversion` has planned it. Runs on: one process.

    Attributes:
        checkpoint: What is converted.
        options: The options of the command.
        run_config: The config of the run.
        meta_model: The trained model.
        exporter: Exports it.
        export: What the exporter made of it.
        outputs: The tensors that :meth:`run` writes.
        weights: Which weights they are: 'averaged' or 'live'.
        n_widened: How many tensors are widened, since the checkpoint has no fp32 master weights of them.
        warnings: Notes for the user before anything is written.
    """

    checkpoint: CheckpointSource
    options: ConvertOptions
    run_config: RunConfig
    meta_model: MetaModel
    exporter: Exporter[Any]
    export: Export
    outputs: PlannedOutputs
    weights: str
    n_widened: int
    warnings: Sequence[str]

    @property
    def step(self) -> Step:
        """The step of the checkpoint; iteration 0 if unknown."""
        iteration, epoch = self.checkpoint.iteration or 0, self.checkpoint.epoch
        if epoch is not None and self.checkpoint.found.path.name.startswith('epoch_'):
            return Step('epoch', epoch, iteration)
        return Step.of_iteration(iteration)

    def description(self) -> list[str]:
        """The model and what will be written, as text."""
        plan = self.outputs.plan
        return [
            f'model {self.meta_model.described_by}; {type(self.exporter).__name__}',
            f'to write: {counted(len(plan.placements), "tensor")}, {size_text(plan.nbytes)} in '
            f'{some([file.name for file in plan.files])}; to read: {size_text(self.outputs.read_nbytes)}',
            *self._notes_on_float32(),
        ]

    def _notes_on_float32(self) -> list[str]:
        if not self.n_widened:
            return []
        return [
            f'float32: this checkpoint has no fp32 master weights for {self.n_widened} of '
            f'{counted(len(self.outputs.plan.reads), "tensor")}: their 16-bit weights are widened'
        ]

    def run(self, out: Path, on_progress: Callable[[int, int], None], *, overwrite: bool) -> CommittedCheckpoint:
        """Write and commit. Libraries may print content of the tokenizer's files.

        Args:
            overwrite: Whether ``out`` may be replaced. Another conversion may have written it in the meantime.
            on_progress: Called in this thread with bytes done and total bytes.

        Raises:
            XhfError, OSError: It failed; ``out`` is unchanged.
        """
        options, plan = self.options, self.outputs.plan
        tokenizer, eos_token_ids, notes = self._find_tokenizer()
        target = CheckpointFolder(out.absolute(), max_keep=-1, elsewhere='give as OUT', warn=notes.append)
        bases = [*base_dirs_of(self.meta_model.module), *filter(None, [options.base])]
        target.lock_and_recover(bases, may_replace=overwrite, remedy=', or add --overwrite')
        started, meter = time.perf_counter(), MemoryMeter()
        try:
            staging = target.open_staging()
            target.require_disk_space(plan.nbytes)
            with errors_naming(target.path):
                notes += self.export.warnings
                notes += self.exporter.write_hf_assets(self.export, staging, tokenizer, eos_token_ids)
                if options.model_card:
                    write_model_card(staging, self.exporter.base_model, self.step)
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
        self.exporter.write_hf_assets(self.export, folder, tokenizer, eos_token_ids)

    def options_shown_by(self, shown: Mapping[str, str]) -> dict[str, str]:
        """The options that the user left open and that apply to this model.

        Args:
            shown: Values of ``lora`` and ``llava_format`` that a folder shows, with which it is to be compared.
        """
        applying = set(self.exporter.options)
        if not adapters_in(self.meta_model.module):
            applying.discard('lora')
        return {name: value for name, value in shown.items() if name in applying and not getattr(self.options, name)}

    def _find_tokenizer(self) -> tuple[Any | None, Sequence[int], list[str]]:
        """The tokenizer to write, the EOS token ids of answers, and notes for the user."""
        module, found = self.meta_model.module, self.checkpoint.found
        save = config_folder(found)
        embeddings = [weight for part in pretrained_in(module).values() for weight in token_embeddings(part)]
        tokenizer, notes = find_tokenizer_of_checkpoint(
            self.exporter,
            beside=folder_of_trainer_files(found, TOKENIZER_CONFIG, *PROCESSOR_FILES),
            recipe=self.run_config.fields.get('tokenizer'),
            config=self.run_config.where,
            base=self.options.base,
            newest_save=save if save is not None and is_save_of_hook(save) else None,
            n_rows=max((weight.shape[0] for weight in embeddings), default=None),
            trust_remote_code=self.options.trust_remote_code,
        )
        if tokenizer is None:
            return None, (), notes
        try:
            tokenizer, eos_token_ids, messages = tokenizer_for_run(tokenizer, self.run_config.fields, may_import=False)
        except OptionError as error:
            return tokenizer, (), [*notes, f'the chat template of training was not written: {error}']
        return tokenizer, eos_token_ids, [*notes, *messages]

    def _manifest_fields(self) -> dict[str, Any]:
        """The manifest's fields besides the files."""
        dtype = self.options.dtype or 'as trained'
        fields = {'dtype': dtype, **self.checkpoint.manifest_fields, 'weights': self.weights}
        return {**fields, 'widened_tensors': self.n_widened} if self.n_widened else fields


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
