"""The options of each frontend.

``HFCheckpointHook`` inherits from :class:`HookOptions` and ``HFCheckpointCallback`` from :class:`CallbackOptions`, so
their signatures are the fields below. ``save_hf`` is a function; a test compares its signature with
:class:`CallOptions`. The docstrings of the frontends and docs/options.md take the meaning of each option from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from xhf_hooks.config.checks import (
    WRITERS,
    Check,
    anything,
    at_least,
    command,
    dotted_path,
    dtype_code,
    folder_or_url,
    library_arguments,
    one_of,
    optional_switch,
    parse_size,
    seconds,
    signal_names,
    size,
    store_url,
    switch,
    tokenizer_like,
)
from xhf_hooks.errors import OptionError

LORA_MODES = ('adapter', 'merge', 'both')
LLAVA_FORMATS = ('xtuner', 'huggingface')
VERIFY_LEVELS = ('sizes', 'full')


def _option(default: Any, meaning: str, check: Check) -> Any:
    return field(default=default, kw_only=True, metadata={'meaning': meaning, 'check': check})


class _Options:
    """Base of all option classes.

    Raises:
        OptionError: A value is invalid, two options conflict, or an option does not exist.
    """

    def __post_init__(self) -> None:
        for option in fields(self):  # type: ignore[arg-type]
            setattr(self, option.name, option.metadata['check'](option.name, getattr(self, option.name)))


@dataclass(eq=False)
class SaveOptions(_Options):
    """What is saved and how. Every frontend has these options; a :class:`xhf_hooks.save.Saver` needs no others.

    Attributes hold checked values: sizes in bytes, dtypes as safetensors codes.
    """

    module: str | None = _option(
        None,
        'Dotted path of the PreTrainedModel inside the trained model. None: the model itself, ``llm``, or the only '
        'PreTrainedModel.',
        dotted_path,
    )
    lora: str | None = _option(
        None,
        "For a model with a LoRA adapter: 'adapter' (the adapter alone, as peft saves it), 'merge' (the complete model "
        "with the adapter merged into its weights) or 'both' (the merged model, and the adapter in "
        "``hf_model/adapter``). None: 'adapter' if the model has one. For XTuner's reward models, None means 'merge', "
        "as in XTuner's converter, unless the base model is quantized; 'adapter' puts the head into "
        '``modules_to_save``.',
        one_of(None, *LORA_MODES),
    )
    llava_format: str | None = _option(
        None,
        "Layout for XTuner's LLaVAModel: 'xtuner' (XTuner's own, without frozen parts) or 'huggingface' (transformers' "
        "LlavaForConditionalGeneration, complete, adapters merged). None: 'xtuner'.",
        one_of(None, *LLAVA_FORMATS),
    )
    tokenizer: Any = _option(
        None,
        "A tokenizer, its MMEngine config, or its folder. None: the run's own (``cfg.tokenizer``, or Trainer's "
        "``processing_class``), else a copy of the base model's files. If there is neither, a warning is logged. "
        "If the run's config names an XTuner prompt template, the saved tokenizer gets a chat template that formats "
        'dialogues as in training, and generation_config gets its stop words.',
        tokenizer_like,
    )
    dtype: str | None = _option(
        None,
        "'float32' (the fp32 master weights where they exist); 'bfloat16' or 'float16' (but fp32 for the tensors that "
        '``from_pretrained`` with that dtype keeps in fp32). What is written in fp32 comes from the master weights '
        'where they exist. None: the dtype of training.',
        dtype_code,
    )
    max_shard_size: int | str = _option('5GB', 'As in ``save_pretrained``.', size)
    bucket_size: int | str = _option(
        '128MB', 'How many bytes are gathered or sent at once. Peak extra memory is about one bucket.', size
    )
    writer: str = _option(
        'auto',
        "'positional': every rank writes its own slices into the files. 'parallel': each file has one writer, and the "
        "other ranks send it their slices; a smaller ``max_shard_size`` gives more files, so more writers. 'stream': "
        "rank 0 writes everything, and the other ranks send it their slices. 'gather': every rank receives every "
        "tensor, and rank 0 writes. 'auto': 'positional' if all ranks see the folder, else 'stream'. All writers "
        'produce the same files.',
        one_of(*WRITERS),
    )
    verify: str = _option(
        'sizes',
        "What is checked before a save is committed. 'sizes': every byte was written, the file sizes, and the headers. "
        "'full': also every byte, read back from the disk and compared with checksums taken from memory.",
        one_of(*VERIFY_LEVELS),
    )
    max_keep_ckpts: int = _option(
        1,
        'How many saves to keep, including the newest. Older ones are named ``hf_model_iter_500`` or '
        '``hf_model_epoch_2``. -1 keeps all.',
        at_least(1, -1),
    )
    backend_args: dict[str, Any] | None = _option(
        None,
        'Keyword arguments for the library of the store in ``out_dir`` or ``upload_to``, such as '
        "``dict(endpoint_url='https://...')``. Keep credentials where that library looks for them, not here.",
        library_arguments,
    )

    @property
    def max_shard_nbytes(self) -> int:
        return parse_size(self.max_shard_size)

    @property
    def bucket_nbytes(self) -> int:
        return parse_size(self.bucket_size)


@dataclass(eq=False)
class CallOptions(SaveOptions):
    """Options of ``save_hf``, which blocks until the save is committed and raises its errors."""

    async_save: ClassVar[bool] = False
    exit_wait_secs: ClassVar[float] = 600.0
    save_on_signal: ClassVar[tuple[str, ...]] = ()
    on_saved: ClassVar[None] = None
    on_error: ClassVar[str] = 'raise'
    upload_to: ClassVar[str | None] = None
    upload_keep: ClassVar[int] = -1

    step: int | None = _option(
        None,
        'Number of finished optimizer steps. Required when several saves are kept: the older ones are named after it.',
        at_least(0, None),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step is None and self.max_keep_ckpts != 1:
            raise OptionError('step', 'an integer of at least 0 (None only when max_keep_ckpts is 1)', None)


@dataclass(eq=False)
class RunOptions(SaveOptions):
    """Options that the hook and the callback share."""

    out_dir: str | Path | None = field(
        default=None,
        metadata={
            'meaning': "Folder of the newest save. None: ``hf_model`` in the run's folder (MMEngine's "
            "``work_dir/<timestamp>``, Trainer's ``output_dir``). With a URL such as ``s3://bucket/run``, each rank "
            'writes its files to a scratch folder below ``TMPDIR``, uploads and deletes them.',
            'check': folder_or_url,
        },
    )
    save_last: bool = _option(True, 'Also save when training ends.', switch)
    async_save: bool = _option(
        False,
        'Copy the weights to host memory, then write the files while training goes on. The copy on each rank is as '
        'large as the data that the rank writes. A save that is due while one is being written waits for it.',
        switch,
    )
    save_on_signal: str | Sequence[str] | None = _option(
        None,
        'A signal, or a list of signals, that requests a save. Sent to any rank, it makes all ranks save at the end of '
        "the next iteration, or of the current validation. After 'SIGUSR1' and 'SIGUSR2' training goes on; 'SIGTERM' "
        "(preemption), 'SIGINT', 'SIGHUP' and 'SIGXCPU' end the process once the save is committed.",
        signal_names,
    )
    on_saved: str | Sequence[str] | None = _option(
        None,
        'A command that rank 0 runs after each save, while training goes on. ``{path}`` is the saved folder (with a '
        'URL as ``out_dir``, the URL of the save), ``{step}`` the iteration, ``{label}`` a name such as ``iter_500``, '
        'and ``{output}`` a local folder for results. Numbers in the last line that it prints as a JSON object go to '
        'the visualizer. When saves come faster than it finishes, it runs for the newest one next. It is ended after a '
        'day; ``timeout 1h COMMAND`` ends it sooner.',
        command,
    )
    exit_wait_secs: float = _option(
        600,
        'How long a process that is ending (after an exception or SIGTERM) waits for a save in progress or for the one '
        'that ``save_on_signal`` requests, and how long the end of training waits for uploads and for ``on_saved``. '
        'torchrun sends SIGKILL 30 s after SIGTERM regardless; torch 2.13 can change that with ``--shutdown-timeout``.',
        seconds,
    )
    upload_to: str | None = _option(
        None,
        "Upload each committed save in the background: to a URL such as 's3://bucket/run' (gs, az, oss and all else "
        'that fsspec supports), where each save has its own prefix (``hf_model_iter_500``) and ``hf_model.json`` '
        "names the newest; or to a repository of the Hub, 'hf://organization/name', where each save is a commit and a "
        'tag.',
        store_url,
    )
    upload_keep: int = _option(
        -1, 'How many uploaded saves to keep, including the newest. -1 keeps all.', at_least(1, -1)
    )
    on_error: str = _option(
        'continue',
        "When a save fails: 'continue' (log the error and go on training) or 'raise'.",
        one_of('continue', 'raise'),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        to_store = isinstance(self.out_dir, str)
        if to_store and self.upload_to is not None:
            raise OptionError('upload_to', 'None when out_dir is a URL', self.upload_to)
        if self.upload_to is None:
            if self.upload_keep != -1:
                raise OptionError('upload_keep', '-1 when upload_to is None', self.upload_keep)
            if self.backend_args is not None and not to_store:
                raise OptionError('backend_args', 'None unless upload_to or out_dir is a URL', [*self.backend_args])
        elif self.upload_to.startswith('hf://'):
            for option, default in (('upload_keep', -1), ('backend_args', None)):
                if getattr(self, option) != default:
                    raise OptionError(option, f'{default} when upload_to is on the Hub', getattr(self, option))


@dataclass(eq=False)
class HookOptions(RunOptions):
    """Options of ``HFCheckpointHook``, named as in MMEngine where it has the same option."""

    interval: int | None = _option(
        None,
        "Number of epochs or iterations between saves; -1 saves only at the end. None: as in the run's "
        'CheckpointHook, with its ``save_begin``.',
        at_least(1, None, -1),
    )
    by_epoch: bool | None = _option(
        None,
        'Whether ``interval`` counts epochs or iterations. None: as the train loop does, epochs in EpochBasedTrainLoop '
        'and iterations in IterBasedTrainLoop.',
        optional_switch,
    )
    save_best: str | list[str] | None = _option(
        None,
        'As in CheckpointHook. The best model goes to ``hf_model_best``, or with several metrics to '
        '``hf_model_best_<metric>``. A save there must beat the best so far, including that of the run that this one '
        'was resumed from.',
        anything,
    )
    rule: str | list[str] | None = _option(None, 'As in CheckpointHook.', anything)
    ema: bool = _option(
        True,
        'If the run has an EMAHook, save its averaged weights, which are the ones that validation scores and that '
        'CheckpointHook saves. False: save the live weights.',
        switch,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by_epoch is not None and self.interval is None:
            raise OptionError('by_epoch', 'None when interval is None, which follows CheckpointHook', self.by_epoch)
        saves_anyway = self.save_last or self.save_best is not None or bool(self.save_on_signal)
        if self.interval == -1 and not saves_anyway:
            expected = 'a positive number, or save_last or save_best: otherwise nothing is ever saved'
            raise OptionError('interval', expected, self.interval)
        if self.rule is not None and self.save_best is None:
            raise OptionError('rule', 'None when save_best is None', self.rule)


@dataclass(eq=False)
class CallbackOptions(RunOptions):
    """Options of ``HFCheckpointCallback``, named as in TrainingArguments where it has the same option."""

    save_strategy: str | None = _option(
        None,
        "'no' (only at the end), 'steps' or 'epoch'. None: whenever Trainer itself saves a checkpoint.",
        one_of(None, 'no', 'steps', 'epoch'),
    )
    save_steps: int | None = _option(
        None,
        "With ``save_strategy='steps'``, the number of steps between saves. None: as in TrainingArguments.",
        at_least(1, None),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.save_steps is not None and self.save_strategy != 'steps':
            raise OptionError('save_steps', f'None when save_strategy is {self.save_strategy!r}', self.save_steps)
        if self.save_strategy == 'no' and not self.save_last and not self.save_on_signal:
            raise OptionError('save_strategy', 'another one, or save_last: otherwise nothing is ever saved', 'no')
