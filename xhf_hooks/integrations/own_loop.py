"""One save by one call, for a training loop of your own: made by the call, or in the background."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from xhf_hooks.errors import SharedError
from xhf_hooks.options import (
    CallOptions,
    CarryBase,
    LlavaFormat,
    LoraMode,
    VerifyLevel,
    WriterName,
    documents_options,
    folder,
)
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.ends.run_end import RunEnd
from xhf_hooks.runs.kept_plan import KeptPlan
from xhf_hooks.runs.run import Run
from xhf_hooks.runs.run_info import RunInfo
from xhf_hooks.runs.unwrap import unwrap
from xhf_hooks.system.threads import wait_until

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SaveHandle:
    """A save in flight, which ``save_hf(..., async_save=True)`` has begun.

    If it is dropped, the save is made all the same, and its outcome is logged.
    """

    def __init__(self, outcome: Future[CommittedCheckpoint], end: RunEnd) -> None:
        self._outcome, self._end = outcome, end

    def done(self) -> bool:
        """Whether the save has ended, committed or failed. Ranks see it a moment apart."""
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> CommittedCheckpoint:
        """Wait for the save, and return what was committed. Needs no other rank.

        Args:
            timeout: Seconds to wait; None waits without a limit.

        Raises:
            TimeoutError: The save has not ended by then. It goes on.
            XhfError: The save failed; the same on every rank, and the previous save is untouched.
        """
        if not wait_until(self._outcome.done, math.inf if timeout is None else timeout):
            raise TimeoutError(f'the save has not ended within {timeout:g} s, and goes on')
        self._end.close()  # it may be under way in a thread: from now on, another process may save there
        return self._outcome.result()


class OptionsOfCall(TypedDict, total=False):
    """The options of :func:`save_hf` besides ``async_save``, which says what it returns; for type checkers."""

    tokenizer: Any
    step: int | None
    max_keep_ckpts: int
    keep_every: int | None
    model_card: bool
    module: str | None
    lora: LoraMode | None
    llava_format: LlavaFormat | None
    dtype: str | None
    carry_base: CarryBase | None
    max_shard_size: int | str
    bucket_size: int | str
    writer: WriterName
    verify: VerifyLevel


@overload
def save_hf(
    model: Any, out_dir: str | Path, *, async_save: Literal[False] = False, **options: Unpack[OptionsOfCall]
) -> CommittedCheckpoint: ...


@overload
def save_hf(
    model: Any, out_dir: str | Path, *, async_save: Literal[True], **options: Unpack[OptionsOfCall]
) -> SaveHandle: ...


@overload
def save_hf(
    model: Any, out_dir: str | Path, *, async_save: bool, **options: Unpack[OptionsOfCall]
) -> CommittedCheckpoint | SaveHandle: ...


@documents_options(CallOptions)
def save_hf(
    model: Any,
    out_dir: str | Path,
    *,
    tokenizer: Any = None,
    step: int | None = None,
    max_keep_ckpts: int = 1,
    keep_every: int | None = None,
    model_card: bool = True,
    module: str | None = None,
    lora: LoraMode | None = None,
    llava_format: LlavaFormat | None = None,
    dtype: str | None = None,
    carry_base: CarryBase | None = None,
    max_shard_size: int | str = '5GB',
    bucket_size: int | str = '128MB',
    writer: WriterName = 'auto',
    verify: VerifyLevel = 'sizes',
    async_save: bool = False,
) -> CommittedCheckpoint | SaveHandle:
    """Save a model that is being trained as a Hugging Face folder. Runs on: all ranks, between two steps.

    The same save as HFCheckpointHook's, with the same option names. Errors that can be detected early are raised
    before any weight is read.

    Args:
        model: A DeepSpeed engine, what ``accelerator.prepare`` returned, or a PreTrainedModel or PeftModel,
            alone, in DDP or in FSDP.
        out_dir: Folder of the newest save; replaced as a whole, and only when the new one is complete.

    Returns:
        The committed save: ``path``, ``step``, ``cost`` (``nbytes``, ``seconds``, memory) and ``warnings``, which are
        also logged. The same on every rank except for seconds; only rank 0 has warnings about files other than
        weights. With ``async_save``, a handle of the save in flight (:class:`SaveHandle`).

    Raises:
        OptionError: An option has a bad value, or does not apply to this model.
        XhfError: The save failed; the same on every rank, and the previous save is untouched.
    """
    began = time.perf_counter()
    path = folder('out_dir', out_dir)
    options = CallOptions(
        step=step,
        tokenizer=tokenizer,
        max_keep_ckpts=max_keep_ckpts,
        keep_every=keep_every,
        model_card=model_card,
        module=module,
        lora=lora,
        llava_format=llava_format,
        dtype=dtype,
        carry_base=carry_base,
        max_shard_size=max_shard_size,
        bucket_size=bucket_size,
        writer=writer,
        verify=verify,
        async_save=async_save,
    )
    _wait_for_save_in_flight()
    committed: list[CommittedCheckpoint] = []
    collective = Collective.shared()  # connects to all ranks at the first call
    try:
        kept = KeptPlan.of(model, collective)
        log = kept.log
        log.said = kept.said
        info = RunInfo(unwrap(model), path, schedule='now')
        run = Run.open(info, options, log, on_committed=committed.append, collective=collective, kept=kept)
        run.newest.is_for_save_hf = True
        log.said = None  # what a save finds, such as NaN, is logged each time
        try:
            with collective.stage('comparing with the last call'):
                if collective.rank == 0:
                    RunEnd.require_no_other_writer(run.newest)
            run.save(Step.of_iteration(options.step or 0), call_began=began)
        except BaseException:
            run.close()
            raise
        if options.async_save:
            outcome, end = run.close_after_save()
            _IN_FLIGHT.append(end)
            return SaveHandle(outcome, end)
        run.close()
    except SharedError:
        raise
    except BaseException:  # Ctrl-C in a notebook: the next call must not begin in the middle of this one
        Collective.abandon_shared()
        raise
    return committed[0]


#: What closes the run of the last call in the background.
_IN_FLIGHT: list[RunEnd] = []


def _wait_for_save_in_flight() -> None:
    """Wait for the save of an earlier call, whose outcome is logged, and close its run."""
    for end in [*_IN_FLIGHT]:
        end.close()
        _IN_FLIGHT.remove(end)
