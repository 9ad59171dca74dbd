"""The options of each frontend.

The frontends are made of these classes: ``HFCheckpointHook`` is a :class:`HookOptions`, ``HFCheckpointCallback`` a
:class:`CallbackOptions`, so that their signatures are the fields below. ``save_hf`` is a function; a test compares
its signature with :class:`CallOptions`. The frontends' docstrings take the meaning of each option from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from xhf_hooks.config.checks import (
    Check,
    anything,
    at_least,
    command_or_function,
    dotted_path,
    dtype_code,
    folder_or_url,
    library_arguments,
    one_of,
    optional_size,
    optional_switch,
    parse_size,
    seconds,
    signal_names,
    size,
    store_url,
    switch,
    tokenizer_like,
    writer_name,
)
from xhf_hooks.errors import OptionError

LORA_MODES = ('adapter', 'merge', 'both')
LLAVA_FORMATS = ('xtuner', 'xtuner_complete', 'huggingface')
VERIFY_LEVELS = ('off', 'sizes', 'full')


def _option(default: Any, meaning: str, check: Check) -> Any:
    return field(default=default, kw_only=True, metadata={'meaning': meaning, 'check': check})


class _Options:
    """Base of the classes of options.

    Raises:
        OptionError: A bad value, a bad combination, or an option that is not there.
    """

    def __post_init__(self) -> None:
        for option in fields(self):  # type: ignore[arg-type]
            setattr(self, option.name, option.metadata['check'](option.name, getattr(self, option.name)))


@dataclass(eq=False)
class SaveOptions(_Options):
    """What is saved and how: for every frontend, and all that a :class:`xhf_hooks.save.Saver` needs.

    Attributes hold checked values: sizes in bytes, safetensors dtypes.
    """

    module: str | None = _option(
        None,
        'Dotted path of the PreTrainedModel in the trained model. None: the model itself, ``llm``, or the only one '
        'there is.',
        dotted_path,
    )
    lora: str | None = _option(
        None,
        "For a model with a LoRA adapter: 'adapter' (as peft saves it), 'merge' (a complete model with the adapter "
        "merged into its weights) or 'both' (the merged model, with the adapter in ``hf_model/adapter``). None: "
        "'adapter' where there is one; only its tensors are gathered. XTuner's reward models: None is 'merge', as "
        "XTuner converts them, unless the base model is quantized; 'adapter' has the head in ``modules_to_save``.",
        one_of(None, *LORA_MODES),
    )
    llava_format: str | None = _option(
        None,
        "For XTuner's LLaVAModel: 'xtuner' (its own layout, without frozen parts), 'xtuner_complete' (with them) or "
        "'huggingface' (transformers' LlavaForConditionalGeneration, complete, adapters merged). None: 'xtuner'.",
        one_of(None, *LLAVA_FORMATS),
    )
    tokenizer: Any = _option(
        None,
        'A tokenizer, its MMEngine config, or its folder. None: the one of the run (``cfg.tokenizer``, or '
        "Trainer's ``processing_class``), else the base model's own files, else none, with a warning.",
        tokenizer_like,
    )
    dtype: str | None = _option(
        None,
        "'float32' (the fp32 master weights where there are any), 'bfloat16' or 'float16'. None: as trained.",
        dtype_code,
    )
    max_shard_size: int | str = _option('5GB', 'As in ``save_pretrained``.', size)
    bucket_size: int | str = _option(
        '128MB', 'How much is gathered and written at once; peak extra memory is about one bucket.', size
    )
    writer: str = _option(
        'auto',
        "'positional' (every rank writes its local shards), 'parallel' (each file has one writer, to which the others "
        'send theirs; no more ranks write than there are files, and a smaller ``max_shard_size`` makes more), '
        "'stream' (the others send theirs to rank 0, which writes), 'gather' (every rank receives every tensor, and "
        "rank 0 writes) or 'auto': 'positional' where all ranks see the folder, else 'stream'. The files are the same.",
        writer_name,
    )
    verify: str = _option(
        'sizes',
        "What is checked before a save is committed. 'off': that every byte was written. 'sizes': also file sizes, "
        "headers, and samples of what each rank has written, read by another rank. 'full': also all bytes, read back "
        'from the disk and compared with checksums taken from memory.',
        one_of(*VERIFY_LEVELS),
    )
    max_keep_ckpts: int = _option(
        1,
        'How many saves to keep, the newest included; the older ones are named ``hf_model_iter_500`` or '
        '``hf_model_epoch_2``. -1 keeps all.',
        at_least(1, -1),
    )
    backend_args: dict[str, Any] | None = _option(
        None,
        'For the library of the store that ``out_dir`` or ``upload_to`` names, such as '
        "``dict(endpoint_url='https://...')``. Credentials belong where that library looks for them, not here.",
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
    """Of ``save_hf``: the caller waits, and gets errors raised."""

    async_save: ClassVar[bool] = False
    async_busy: ClassVar[str] = 'wait'
    exit_wait_secs: ClassVar[float] = 600.0
    save_on_signal: ClassVar[tuple[str, ...]] = ()
    save_on_file: ClassVar[bool] = False
    save_on_exception: ClassVar[bool] = False
    on_saved: ClassVar[None] = None
    on_saved_timeout_secs: ClassVar[float] = 0.0
    on_saved_queue: ClassVar[str] = 'newest'
    on_error: ClassVar[str] = 'raise'
    upload_to: ClassVar[str | None] = None
    upload_keep: ClassVar[int] = -1
    upload_nbytes_per_sec: ClassVar[int | None] = None

    step: int | None = _option(
        None, 'Optimizer steps done. Needed when several saves are kept: it names the older ones.', at_least(0, None)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step is None and self.max_keep_ckpts != 1:
            raise OptionError('step', 'a number of at least 0 (None only when max_keep_ckpts is 1)', None)


@dataclass(eq=False)
class RunOptions(SaveOptions):
    """Of hook and callback: how all saves of a run are made."""

    out_dir: str | Path | None = field(
        default=None,
        metadata={
            'meaning': 'Folder of the newest save. None: ``hf_model`` in the folder of the run '
            "(MMEngine's ``work_dir/<timestamp>``, Trainer's ``output_dir``). Or a URL such as ``s3://bucket/run``: "
            'every rank sends the files that it owns straight from memory to the object store, and nothing is written '
            'to a disk.',
            'check': folder_or_url,
        },
    )
    save_last: bool = _option(True, 'Save when training ends, whatever is due.', switch)
    async_save: bool = _option(
        False,
        'Copy what is to be saved to host memory, as many bytes on each rank as it writes, and write it while training '
        'goes on.',
        switch,
    )
    async_busy: str = _option(
        'wait', "'wait' or 'skip' a save that is due while the one before is being written.", one_of('wait', 'skip')
    )
    save_on_signal: str | Sequence[str] | None = _option(
        None,
        "Signals to any rank that make all ranks save at the end of the iteration or of the validation: 'SIGUSR1', "
        "'SIGUSR2', and those that end a process, which they then do after the save: 'SIGTERM' (preemption), 'SIGINT', "
        "'SIGHUP', 'SIGXCPU'. One or several.",
        signal_names,
    )
    save_on_file: bool = _option(
        False,
        'Save, as on a signal, when a file ``save_now`` appears in the work_dir (Trainer: in ``output_dir``), which is '
        'deleted then.',
        switch,
    )
    save_on_exception: bool = _option(
        False,
        'When an exception that nobody catches ends all ranks, save the weights as they are in memory then to '
        '``hf_model_exception``.',
        switch,
    )
    on_saved: str | Sequence[str] | dict[str, Any] | Callable[..., Any] | None = _option(
        None,
        'What rank 0 does after each save, beside training: a command, in which ``{path}`` is the saved folder, '
        '``{step}`` the iteration, ``{label}`` such as ``iter_500``, ``{name}`` such as ``hf_model`` and ``{output}`` '
        'a folder for its results; or a function of path and iteration; or the config that MMEngine builds one from. '
        'Numbers that come of it go to the visualizer.',
        command_or_function,
    )
    on_saved_timeout_secs: float = _option(3600, 'After this time the command of ``on_saved`` is ended.', seconds)
    on_saved_queue: str = _option(
        'newest',
        "Where saves come faster than ``on_saved`` is done: 'newest', the others are left out, or 'all', and each "
        'folder is kept until its turn has come.',
        one_of('newest', 'all'),
    )
    exit_wait_secs: float = _option(
        600,
        'How long the end of the process (an exception, SIGTERM) waits for a save that is being written, or for the '
        'one that ``save_on_signal`` makes; and the end of training for ``on_saved``. torchrun '
        'follows SIGTERM with SIGKILL after 30 s whatever is set here, unless it is started with '
        '``--shutdown-timeout`` (torch 2.13 has it; older ones always kill after 30 s).',
        seconds,
    )
    upload_to: str | None = _option(
        None,
        "Where each committed save is uploaded, beside training: a URL such as 's3://bucket/run' (gs, az, oss and all "
        'else that fsspec knows). Each save has a prefix of its own there, ``hf_model_iter_500``; ``hf_model.json`` '
        "names the newest. Or 'hf://organization/name', a repository of the Hub: each save is a commit and a tag.",
        store_url,
    )
    upload_keep: int = _option(
        -1, 'How many saves to keep where ``upload_to`` leads, the newest included. -1 keeps all.', at_least(1, -1)
    )
    upload_limit: int | str | None = _option(
        None, "What a rank may upload per second, such as '40MB'. None: as fast as it goes.", optional_size
    )
    on_error: str = _option('continue', "'continue' or 'raise', when a save fails.", one_of('continue', 'raise'))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.async_busy != 'wait' and not self.async_save:
            raise OptionError('async_busy', "'wait' when async_save is False", self.async_busy)
        to_store = isinstance(self.out_dir, str)
        if to_store and self.upload_to is not None:
            raise OptionError('upload_to', 'None when out_dir is a URL', self.upload_to)
        if to_store and self.on_saved is not None:
            raise OptionError('on_saved', 'None when out_dir is a URL: it reads a folder', self.on_saved)
        if self.on_saved_queue != 'newest' and self.on_saved is None:
            raise OptionError('on_saved_queue', "'newest' when on_saved is None", self.on_saved_queue)
        if self.upload_to is None:
            for option, default in (('upload_keep', -1), ('upload_limit', None)):
                if getattr(self, option) != default:
                    raise OptionError(option, f'{default} when upload_to is None', getattr(self, option))
            if self.backend_args is not None and not to_store:
                raise OptionError('backend_args', 'None without a URL as upload_to or out_dir', [*self.backend_args])
        elif self.upload_to.startswith('hf://'):
            for option, default in (('upload_keep', -1), ('upload_limit', None), ('backend_args', None)):
                if getattr(self, option) != default:
                    raise OptionError(option, f'{default} when upload_to is on the Hub', getattr(self, option))

    @property
    def upload_nbytes_per_sec(self) -> int | None:
        return None if self.upload_limit is None else parse_size(self.upload_limit)

    @property
    def saves_on_demand(self) -> bool:
        """Whether there may be saves that no schedule knows of."""
        return bool(self.save_on_signal) or self.save_on_file


@dataclass(eq=False)
class HookOptions(RunOptions):
    """Of ``HFCheckpointHook``; names are MMEngine's own where it has one."""

    interval: int | None = _option(
        None,
        "Save every so many epochs or iterations; -1: only at the end. None: as the run's own CheckpointHook.",
        at_least(1, None, -1),
    )
    by_epoch: bool | None = _option(
        None,
        'Whether ``interval`` counts epochs. None: it counts what the train loop counts, epochs in '
        'EpochBasedTrainLoop and iterations in IterBasedTrainLoop.',
        optional_switch,
    )
    save_begin: int = _option(0, 'Epoch or iteration at which saving begins.', at_least(0))
    save_best: str | list[str] | None = _option(
        None,
        'As in CheckpointHook; writes ``hf_model_best`` (``hf_model_best_<metric>`` for several). What is in that '
        'folder, and in those of the runs that a resumed checkpoint comes from, is only replaced or followed by a '
        'better one.',
        anything,
    )
    rule: str | list[str] | None = _option(None, 'As in CheckpointHook.', anything)
    chat_template: bool = _option(
        True,
        "When the run's config names an XTuner prompt template, give the saved tokenizer the chat template that "
        'writes dialogues as training had them, and generation_config its stop words.',
        switch,
    )
    ema: bool = _option(
        True,
        'Where the run has an EMAHook, save the weights that it averages, as CheckpointHook does and validation '
        'scores. False: the live ones.',
        switch,
    )

    defer_copy: bool = _option(
        False,
        'With ``async_save``: do not stop training for the copy, but copy while it goes on with the next forward and '
        'backward passes; the step of the optimizer and validation wait for the end of it. Weights on the CPU only, '
        'without averaging, FSDP and NVMe; all else is copied at once. Nothing else, such as a hook, may change '
        'weights before that step.',
        switch,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.defer_copy and not self.async_save:
            raise OptionError('defer_copy', 'False when async_save is False', self.defer_copy)
        if self.by_epoch is not None and self.interval is None:
            raise OptionError('by_epoch', 'None when interval is None, which follows CheckpointHook', self.by_epoch)
        saves_anyway = self.save_last or self.save_best is not None or self.saves_on_demand
        if self.interval == -1 and not saves_anyway:
            expected = 'a number, or save_last or save_best: otherwise nothing is ever saved'
            raise OptionError('interval', expected, self.interval)
        if self.rule is not None and self.save_best is None:
            raise OptionError('rule', 'None when save_best is None', self.rule)


@dataclass(eq=False)
class CallbackOptions(RunOptions):
    """Of ``HFCheckpointCallback``; names are those of TrainingArguments where it has one."""

    save_strategy: str | None = _option(
        None,
        "'no' (only at the end), 'steps' or 'epoch'. None: whenever Trainer itself saves a checkpoint.",
        one_of(None, 'no', 'steps', 'epoch'),
    )
    save_steps: int | None = _option(
        None,
        "With ``save_strategy='steps'``, how often. None: as in TrainingArguments.",
        at_least(1, None),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.save_steps is not None and self.save_strategy != 'steps':
            raise OptionError('save_steps', f'None when save_strategy is {self.save_strategy!r}', self.save_steps)
        if self.save_strategy == 'no' and not self.save_last and not self.saves_on_demand:
            raise OptionError('save_strategy', 'another one, or save_last: otherwise nothing is ever saved', 'no')
