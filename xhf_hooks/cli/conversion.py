"""What ``xhf-convert`` does once its options are parsed: find, rebuild, plan, describe, write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from xhf_hooks.cli.output import descriptors_silenced
from xhf_hooks.commit.checkpoint_folder import CheckpointFolder
from xhf_hooks.convert import Converter, ConvertOptions
from xhf_hooks.errors import OptionError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.exporters.xtuner.reward import has_head
from xhf_hooks.format.text import size_text, some
from xhf_hooks.meta_model import RunConfig, build_meta_model, find_run_config, match_checkpoint
from xhf_hooks.meta_model.tokenizer import tokenizer_of_run
from xhf_hooks.planning.types import CommittedCheckpoint, SavePlan, Step, TensorSpec
from xhf_hooks.sources.checkpoint import CheckpointSource, find_checkpoint


class Conversion:
    """One checkpoint on its way.

    Args: as the options of the command.

    Attributes:
        averages: Whether the checkpoint holds averaged and live weights.
        warnings: What the user should know before anything is written.

    Raises:
        XhfError: It will not work; nothing was written.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        config: Path | None,
        base: str | None,
        module: str | None,
        lora: str | None,
        llava_format: str | None,
        ema: bool,
        dtype: str | None,
        max_shard_nbytes: int,
        workers: int,
        verify: bool,
        trust_remote_code: bool,
        optimizer_restarted: bool,
    ) -> None:
        self._found = find_checkpoint(checkpoint)
        self._source = CheckpointSource(self._found, ema=ema, optimizer_restarted=optimizer_restarted)
        self.averages = self._source.averages
        self._specs = self._source.specs()
        self._base, self._trust = base, trust_remote_code
        self._config = find_run_config(config, self._source.config_text, self._found.path)
        names = [name for spec in self._specs for name in (spec.name, *spec.aliases)]
        self._meta_model = build_meta_model(
            self._config, self._found.path, names, base=base, trust_remote_code=trust_remote_code
        )
        matched, notes = match_checkpoint(self._meta_model, self._source, self._source.trained_dtype)
        exporter = exporter_for(
            self._meta_model.module,
            module,
            lora=lora,
            llava_format=llava_format,
            reward_token_id=self._reward_token_id(),
        )
        self._weights, weights_notes = _which_weights(self._source, self._config, ema)
        facts = {**self._source.facts, 'weights': self._weights}  # and what the plan tells
        options = ConvertOptions(dtype, max_shard_nbytes, workers, verify, facts=facts)
        self.converter = Converter(matched, exporter, options)
        self._widened = _widened(self.converter.plan) if dtype == 'F32' else 0
        if self._widened:
            facts['widened_tensors'] = self._widened
        self.warnings = [*self._source.warnings, *weights_notes, *notes, *exporter.notes]
        if exporter.left_out:
            self.warnings.append(f'not exported: {len(exporter.left_out)} tensors ({some(exporter.left_out)})')

    def _reward_token_id(self) -> int | None:
        found = None if self._config is None else self._config.fields.get('reward_token_id')
        return found if type(found) is int and has_head(self._meta_model.module) else None

    @property
    def step(self) -> Step:
        """The iteration that the checkpoint is of; 0 if nothing tells."""
        iteration, epoch = self._source.iteration or 0, self._source.epoch
        if epoch is not None and self._found.path.name.startswith('epoch_'):
            return Step('epoch', epoch, iteration)
        return Step('iter', iteration, iteration)

    def description(self) -> list[str]:
        """What was found, and what will be written."""
        facts, plan = self._source.facts, self.converter.plan
        engine = str(facts.get('engine'))
        if facts.get('zero_stage') is not None:
            engine += f' ZeRO-{facts["zero_stage"]}, {facts.get("world_size")} rank(s)'
        which = f' (the {self._weights} weights)' if self.averages else ''
        iteration = 'unknown' if self._source.iteration is None else self._source.iteration
        return [
            f'found {self._found.path}: {facts.get("layout")}, {engine}, iteration {iteration}, '
            f'{len(self._specs)} tensors{which}, {size_text(self._found.nbytes)}',
            *self._source.unproven,
            f'model {self._meta_model.described_by}; {type(self.converter.exporter).__name__}',
            f'to write: {len(plan.placements)} tensors, {size_text(plan.nbytes)} in '
            f'{some([file.name for file in plan.files])}; to read: {size_text(self.converter.read_nbytes)}',
            *self._notes_on_float32(),
        ]

    def _notes_on_float32(self) -> list[str]:
        if not self._widened:
            return []
        n_tensors = len(_read_specs(self.converter.plan))
        return [
            f'float32: {self._widened} of {n_tensors} tensors have no fp32 master weights in this checkpoint; they are '
            f'the 16-bit weights, widened'
        ]

    def run(self, out: Path, on_progress: Callable[[int, int], None]) -> CommittedCheckpoint:
        """Write ``out``.

        Raises:
            XhfError, OSError: It failed, and ``out`` is as it was.
        """
        with descriptors_silenced():
            tokenizer, eos_token_ids, notes = tokenizer_of_run(
                self._config, self.converter.exporter, self._base, trust_remote_code=self._trust
            )
        folder = CheckpointFolder(out.absolute(), max_keep=-1, elsewhere='give as OUT')
        folder.claim()
        try:
            committed = self.converter.convert(folder, self.step, tokenizer, tuple(eos_token_ids), on_progress)
        finally:
            folder.release()
        warnings = (*notes, *committed.warnings, *self._notes_on_float32())
        return CommittedCheckpoint(committed.path, committed.step, committed.cost, warnings)


def _read_specs(plan: SavePlan) -> set[TensorSpec]:
    return {spec for group in (*plan.sliced, *plan.gathered) for spec in group.reads}


def _widened(plan: SavePlan) -> int:
    """Tensors of a float32 plan that were rounded to 16 bits before."""
    return sum(spec.master_lost for spec in _read_specs(plan))


def _which_weights(source: CheckpointSource, config: RunConfig | None, ema: bool) -> tuple[str, list[str]]:
    """'averaged' or 'live', and what the user should know about it.

    Raises:
        OptionError: The live ones are wanted, and not there.
    """
    weights = source.facts['weights']
    if source.averages or config is None or not config.averages:
        return weights, []
    if source.found.layout == 'file' and not config.uses_deepspeed:  # published without what resuming needs
        if not ema:
            raise OptionError('--no-ema', 'a checkpoint with the ema_state_dict of its run', source.found.path.name)
        return 'averaged', []
    if not ema:
        return weights, []
    note = (
        'the run averages its weights (EMAHook), but its checkpoints are of DeepSpeed and hold the live ones alone, '
        'which are converted. The averaged ones are in the hf_model of the run, if it had HFCheckpointHook'
    )
    return weights, [note]
