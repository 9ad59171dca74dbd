"""What all saves of one live model share: the plan, the threads, the memory, the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xhf_hooks.files.writer import Writer
from xhf_hooks.options import SaveOptions
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.ends.background_task import BackgroundTask
from xhf_hooks.runs.kept_plan import KeptPlan
from xhf_hooks.runs.preparation import Preparation, prepare_saves
from xhf_hooks.runs.save_in_flight import SaveInFlight
from xhf_hooks.runs.telemetry import RunLog, warn_of_left_out
from xhf_hooks.runs.unwrap import Unwrapped
from xhf_hooks.sources import Source, source_for
from xhf_hooks.sources.host_memory import SnapshotMemory


@dataclass(eq=False)
class SaveContext:
    """What all saves of one live model share. Runs on: all ranks, unless a method says otherwise.

    Made by :meth:`open`.

    Attributes:
        unwrapped: The bare model (``.model``), and what has its tensors (``.root``), such as an FSDP1 wrapper.
        log: Gets warnings of what is trained and not saved, and the progress of long saves.
        strategy: Which rank writes which bytes.
        source: Gives the model's tensors; made again at each save.
        preparation: The plan and what it was made from; made again when the model's tensors or config change.
        is_planned_before: Whether an earlier call of ``save_hf`` has planned and checked these saves.
        background: The thread of saves in the background; None if all saves are made in the foreground.
        background_collective: Connects the ranks for that thread: meanwhile the thread that trains uses another one,
            also while it waits for a save.
        memory: Host memory for the copy that a save in the background is written from.
        kept: What calls of ``save_hf`` for this model share; None for a hook or callback.
        tokenizer: Written beside the weights. Set it on rank 0.
        eos_token_ids: Added to generation_config.json. Set them on rank 0.
    """

    unwrapped: Unwrapped
    options: SaveOptions
    collective: Collective
    log: RunLog
    strategy: WriteStrategy
    source: Source
    preparation: Preparation
    writer: Writer
    background: BackgroundTask[SaveInFlight] | None
    background_collective: Collective | None = None
    memory: SnapshotMemory = field(default_factory=SnapshotMemory)
    tokenizer: Any | None = None
    eos_token_ids: Sequence[int] = ()
    is_planned_before: bool = False
    kept: KeptPlan | None = None

    @classmethod
    def open(
        cls,
        unwrapped: Unwrapped,
        options: SaveOptions,
        collective: Collective,
        log: RunLog,
        do_last: Callable[[Callable[[], None]], object],
        *,
        strategy: WriteStrategy,
        stays_cached: bool = False,
        kept: KeptPlan | None = None,
    ) -> SaveContext:
        """Plan the saves of a model, and start the threads that make them.

        Args:
            unwrapped: The trained model (:class:`.Unwrapped`).
            log: As the attribute.
            do_last: Called with what ends a thread, frees the memory for copies or closes a connection, once that is
                made. None of it refers to the model. It is to be called when no save is in flight.
            strategy: As chosen for the option ``writer`` (runs/access.py).
            stays_cached: Leave the files in the page cache, for a program that reads them at once.
            kept: What calls of ``save_hf`` for this model share: its plan serves again if it fits on all ranks.

        Raises:
            AgreedError: The model cannot be exported; the message has the reason.
            RanksDifferError: Ranks hold different models.
        """
        with collective.stage('plan') as must_plan:
            source = source_for(unwrapped.root)
            found = None if kept is None else kept.preparation(unwrapped, source, options, strategy)
            must_plan.is_set = found is None
        if must_plan.is_set or found is None:  # on all ranks, if one has to
            with collective.stage('plan'):
                found = prepare_saves(unwrapped, source, options, strategy, collective, log)
        background: BackgroundTask[SaveInFlight] | None = None
        background_collective = None
        if options.async_save:
            background = BackgroundTask('a save in the background', SaveInFlight.save, must_finish=True)
            background_collective = Collective.connect() if kept is None else Collective.shared('background')
            do_last(background_collective.close)
        with collective.stage('start threads'):
            # One bucket waits for the disk while the next one is gathered
            writer = Writer(options.bucket_nbytes, in_background=options.async_save, stays_cached=stays_cached).start()
            do_last(writer.close)
            if background is not None:
                do_last(background.start().close)
        made = (source, found, writer, background, background_collective)
        context = cls(unwrapped, options, collective, log, strategy, *made)
        if kept is None:
            do_last(context.memory.free)
        else:  # the next call uses the memory again
            context.kept, context.memory, context.is_planned_before = kept, kept.memory, not must_plan.is_set
            context.tokenizer, context.eos_token_ids = kept.tokenizer()
        return context

    @property
    def plan(self) -> SavePlan:
        """The plan of a save."""
        return self.preparation.plan

    def update(self) -> None:
        """Read the model's tensors anew, and plan again if they or the config have changed. Runs on: all ranks.

        Raises:
            SharedError: The model cannot be exported any more, or ranks hold different models.
        """
        prepared, has_other_tensors = self.preparation, False
        if self.kept is None:  # else open() has just made the source and looked, in the same call of save_hf
            self.source = source_for(self.unwrapped.root)
            has_other_tensors = self.source.specs() != prepared.specs
        warn_of_left_out(self.log, prepared.left_out, self.unwrapped.model)
        is_outdated = has_other_tensors or prepared.exporter.is_outdated(prepared.export)
        if self.collective.vote_any(is_outdated, 'plan'):
            self.preparation = prepare_saves(
                self.unwrapped, self.source, self.options, self.strategy, self.collective, self.log
            )
        if self.kept is not None:
            self.kept.keep(self.preparation, self.options, self.strategy, self.tokenizer, self.eos_token_ids)

    def write_hf_assets(self, folder: Path) -> list[str]:
        """Write all files except the weights; returns all warnings for the log. Runs on: rank 0."""
        prepared = self.preparation
        of_files = prepared.exporter.write_hf_assets(prepared.export, folder, self.tokenizer, self.eos_token_ids)
        return [*prepared.export.warnings, *of_files]

    def ensure_connected(self) -> bool:
        """Reconnect the ranks for background saves if a connection has broken; returns whether it had.

        Runs on: all ranks. No save may be in flight.

        Raises:
            RankLostError: Ranks could not connect.
        """
        # A rank that failed since the caller's stage began votes on this collective. Vote here first: the background
        # collective, below, is another one, and the two votes would not pair
        self.collective.raise_if_any_failed('save')
        return self.background_collective is not None and self.background_collective.ensure_connected()
