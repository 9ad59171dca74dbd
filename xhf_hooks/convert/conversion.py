"""The flow of a conversion: that of :mod:`xhf_hooks.saves.save`, without ranks.

CheckpointSource        the tensors in the files           names and shapes, no data
MetaModel               the trained model                  on the meta device, no data
Exporter.entries()      exported tensors and their names   the same exporters as the hook
make_plan()             the place of each byte
write_weights()         slices are read, cast and written  by several threads, a block each
commit()                staging gets the final name
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xhf_hooks.convert.weights import write_weights
from xhf_hooks.errors import OptionError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.exporters.base_files import base_dirs_of
from xhf_hooks.exporters.find_model import adapters_in
from xhf_hooks.exporters.xtuner.reward import has_head
from xhf_hooks.format.dtypes import is_float
from xhf_hooks.format.text import counted, engine_text, size_text, some
from xhf_hooks.meta_model import RunConfig, build_meta_model, find_run_config, match_checkpoint
from xhf_hooks.meta_model.beside import adapter_beside, frozen_only
from xhf_hooks.meta_model.frozen import dtype_of_frozen, edited_by_adapters
from xhf_hooks.meta_model.tokenizer import tokenizer_of_run
from xhf_hooks.model import module_tensors
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import CommittedCheckpoint, SaveCost, SavePlan, Step, WrittenSave
from xhf_hooks.sources.checkpoint import CheckpointSource
from xhf_hooks.sources.host_memory import MemoryMeter
from xhf_hooks.sources.stored_tensors import StoredTensor
from xhf_hooks.system.calls import naming
from xhf_hooks.writers.tally import warn_of_non_finite


@dataclass(frozen=True)
class ConvertOptions:
    """The options of ``xhf-convert``, parsed.

    Attributes:
        ema: Export the averaged weights if the checkpoint holds both averaged and live ones.
        dtype: Safetensors dtype of floating-point tensors, cast once from the fp32 master weights where there are
            any. AS_IN_BASE: each as in the base model's files. None: the training dtype, bit for bit what the hook
            saves.
        workers: Threads that read, cast and write.
        verify: Before the commit, read everything back and compare checksums, which were taken in memory.
    """

    config: Path | None = None
    base: str | None = None
    module: str | None = None
    lora: str | None = None
    llava_format: str | None = None
    ema: bool = True
    dtype: str | None = None
    max_shard_nbytes: int = 5 * 10**9
    workers: int = 1
    verify: bool = False
    trust_remote_code: bool = False


class Conversion:
    """The conversion of one checkpoint. Runs on: one process.

    Attributes:
        tensors: What the plan is made of, by name.
        plan: The plan that :meth:`run` writes.
        warnings: Notes for the user before anything is written.

    Raises:
        XhfError: The checkpoint cannot be converted. Nothing was written.
    """

    def __init__(self, checkpoint: CheckpointSource, options: ConvertOptions) -> None:
        self._checkpoint, self._options = checkpoint, options
        self._found = checkpoint.found
        self._specs = checkpoint.specs()
        beside = adapter_beside(self._found.path)
        held = {name for spec in self._specs for name in (spec.name, *spec.aliases)}
        self._config = find_run_config(options.config, self._checkpoint.config_text, self._found.path)
        self._meta_model = build_meta_model(
            self._config,
            self._found.path,
            {
                **{name: tensor.shape for name, tensor in beside.items()},
                **{name: spec.shape for spec in self._specs for name in (spec.name, *spec.aliases)},
            },
            base=options.base,
            trust_remote_code=options.trust_remote_code,
        )
        frozen = frozen_only(self._meta_model.module, beside, held)
        tensors = [*self._checkpoint.tensors.values(), *frozen]
        dtype, self._knows_dtype = self._dtype_of_frozen(tensors)
        self.tensors, notes = match_checkpoint(self._meta_model, tensors, dtype)
        held.update(tensor.name for tensor in frozen)
        self._of_base = {
            name: tensor.name
            for tensor in self.tensors.values()
            if held.isdisjoint(names := (tensor.name, *tensor.aliases))
            for name in names
        }
        self._forget_quantizers()
        self._exporter = exporter_for(
            self._meta_model.module,
            options.module,
            lora=options.lora,
            llava_format=options.llava_format,
            reward_token_id=self._reward_token_id(),
        )
        self._weights, weights_notes = _which_weights(self._checkpoint, self._config, options.ema)
        self.plan = self._make_plan()
        self._widened = sum(spec.master_lost for spec in self.plan.reads) if options.dtype == 'F32' else 0
        self.warnings = [*self._checkpoint.warnings, *weights_notes, *notes, *self._exporter.notes]
        self.warnings += self._judge_frozen()
        self.warnings += self._exporter.rehearse(self.plan.placements)
        if self._exporter.left_out:
            left_out = self._exporter.left_out
            self.warnings.append(f'not exported: {len(left_out)} tensors ({some(left_out)})')

    def _dtype_of_frozen(self, tensors: Sequence[StoredTensor]) -> tuple[str | None, bool]:
        """The dtype that training gave to weights of the base, and whether it is known."""
        if self._checkpoint.trained_dtype is not None:
            return self._checkpoint.trained_dtype, True
        stored = {name: tensor for tensor in tensors for name in (tensor.name, *tensor.aliases)}
        module = self._meta_model.module
        frozen = [name for name, tensor in module_tensors(module) if not tensor.requires_grad and name in stored]
        found = dtype_of_frozen(self._config, stored, frozen) if adapters_in(module) else None
        return found, found is not None

    def _judge_frozen(self) -> list[str]:
        """Notes on weights of the base that training had otherwise.

        Raises:
            OptionError: They are to be merged, and are not those of training.
        """
        adapters = adapters_in(self._meta_model.module)
        bases = ' and '.join(base.folder for base in self._meta_model.bases)
        read = self._of_base.keys() & {name for spec in self.plan.reads for name in (spec.name, *spec.aliases)}
        edited = {name: init for name, init in edited_by_adapters(self._meta_model.module) if name in self._of_base}
        init = next(iter(edited.values()), None)
        if read & edited.keys():
            raise OptionError(
                'lora',
                f"'adapter', because init_lora_weights={init!r} changed the base's weights before training, and the "
                f'checkpoint does not have them: with peft, load the adapter onto {bases} and merge it',
                self._options.lora,
            )
        notes = []
        if edited:
            notes.append(
                f'init_lora_weights={init!r} changed the weights of {bases} before training, and does so again when '
                f'peft loads the adapter: it needs this base, unchanged'
            )
        if adapters and read and not self._knows_dtype and self._options.dtype is None:
            dtypes = sorted({self.tensors[self._of_base[name]].dtype for name in read})
            notes.append(
                f'nothing tells in which dtype training had the frozen weights: they are merged as they are in {bases} '
                f'({", ".join(dtypes)}); --dtype gives another'
            )
        return notes

    def _forget_quantizers(self) -> None:
        """A base's config may name a quantizer that training did without: then the checkpoint has all its weights."""
        specs = [spec for spec in self._specs if is_float(spec.dtype)]
        held = {name for spec in specs for name in (spec.name, *spec.aliases)}
        for path, part in self._meta_model.module.named_modules():
            if hasattr(getattr(part, 'config', None), 'quantization_config'):
                names = (f'{path}.{name}'.removeprefix('.') for name, _ in part.named_parameters())
                if held.issuperset(names):
                    del part.config.quantization_config

    def _reward_token_id(self) -> int | None:
        found = None if self._config is None else self._config.fields.get('reward_token_id')
        return found if type(found) is int and has_head(self._meta_model.module) else None

    def _make_plan(self) -> SavePlan:
        specs = [tensor.spec for tensor in self.tensors.values()]
        entries = self._exporter.entries(specs, self._options.dtype)
        if self.use_fp32_master:
            specs = [replace(spec, dtype='F32') if spec.has_master else spec for spec in specs]
        return make_plan(
            entries,
            specs,
            max_shard_nbytes=self._options.max_shard_nbytes,
            bucket_nbytes=1,
            n_parameters=self._exporter.n_parameters,
            in_place=True,
        )

    @property
    def use_fp32_master(self) -> bool:
        """Whether to read fp32 master weights where there are any."""
        return self._options.dtype is not None

    @property
    def read_nbytes(self) -> int:
        """Bytes that :meth:`run` reads from the checkpoint."""
        return sum(self.tensors[spec.name].read_nbytes(self.use_fp32_master) for spec in self.plan.reads)

    @property
    def step(self) -> Step:
        """The step of the checkpoint; iteration 0 if unknown."""
        iteration, epoch = self._checkpoint.iteration or 0, self._checkpoint.epoch
        if epoch is not None and self._found.path.name.startswith('epoch_'):
            return Step('epoch', epoch, iteration)
        return Step('iter', iteration, iteration)

    def description(self) -> list[str]:
        """The model and what will be written, as text."""
        plan = self.plan
        return [
            f'model {self._meta_model.described_by}; {type(self._exporter).__name__}',
            f'to write: {len(plan.placements)} tensors, {size_text(plan.nbytes)} in '
            f'{some([file.name for file in plan.files])}; to read: {size_text(self.read_nbytes)}',
            *self._notes_on_float32(),
        ]

    def _notes_on_float32(self) -> list[str]:
        if not self._widened:
            return []
        return [
            f'float32: {self._widened} of {len(self.plan.reads)} tensors have no fp32 master weights in this '
            f'checkpoint; their 16-bit weights are widened'
        ]

    def run(self, out: Path, on_progress: Callable[[int, int], None]) -> CommittedCheckpoint:
        """Write and commit. Libraries may print content of the tokenizer's files.

        Args:
            out: The folder to write.
            on_progress: Called in this thread with bytes done and total bytes.

        Raises:
            XhfError, OSError: It failed; ``out`` is unchanged.
        """
        tokenizer, eos_token_ids, notes = tokenizer_of_run(
            self._config,
            self._exporter,
            self._found.path,
            self._options.base,
            trust_remote_code=self._options.trust_remote_code,
        )
        target = CheckpointFolder(out.absolute(), max_keep=-1, elsewhere='give as OUT', warn=notes.append)
        target.claim([*base_dirs_of(self._meta_model.module), *filter(None, [self._options.base])])
        started, meter = time.perf_counter(), MemoryMeter()
        try:
            staging = target.open_staging()
            target.require_room(self.plan.nbytes)
            with naming(target.path):
                notes += self._exporter.write_hf_assets(staging, tokenizer, eos_token_ids)
            tally = write_weights(
                staging,
                self.plan,
                self.tensors,
                use_fp32_master=self.use_fp32_master,
                workers=self._options.workers,
                meter=meter,
                on_progress=on_progress,
            )
            tensors = tally.written()
            save = WrittenSave(self.plan, tensors, self.step, self._facts())
            with naming(target.path):
                target.commit(save, 'full' if self._options.verify else 'sizes')
        finally:  # including signals
            target.abort()
            target.release()
        seconds = time.perf_counter() - started
        cost = SaveCost(self.plan.nbytes, seconds, seconds, meter.peak_extra_nbytes)
        notes += [*warn_of_non_finite(tensors), *self._notes_on_float32()]
        return CommittedCheckpoint(target.path, self.step, cost, tuple(notes))

    def _facts(self) -> dict[str, Any]:
        """The manifest's fields besides the files."""
        facts = {'dtype': self._options.dtype or 'as trained'}
        facts |= {**self._checkpoint.facts, 'weights': self._weights}
        return {**facts, 'widened_tensors': self._widened} if self._widened else facts


def describe_checkpoint(source: CheckpointSource) -> list[str]:
    """What a checkpoint holds, and what its files cannot prove, as text."""
    specs, found, facts = source.specs(), source.found, source.facts
    iteration = 'unknown' if source.iteration is None else source.iteration
    held = [f'{n} {dtype}' for dtype, n in Counter(spec.dtype for spec in specs).items()]
    held += [f'the {facts["weights"]} weights'] if source.averages else []
    return [
        f'found {found.path}: {facts["layout"]}, {engine_text(facts)}, iteration {iteration}, '
        f'{counted(len(specs), "tensor")} ({", ".join(held)}), {size_text(found.nbytes)}',
        *source.unproven,
    ]


def _which_weights(checkpoint: CheckpointSource, config: RunConfig | None, ema: bool) -> tuple[str, list[str]]:
    """'averaged' or 'live', and notes for the user.

    Raises:
        OptionError: Live weights are requested, but the checkpoint has none.
    """
    weights = checkpoint.facts['weights']
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
