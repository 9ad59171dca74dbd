"""Every option once: its name, type, default, what it means, how it is checked, and which doors have it.

The doors are made of these classes: ``HFCheckpointHook`` is a :class:`HookOptions`, ``HFCheckpointCallback`` a
:class:`CallbackOptions`, so that their signatures are the fields below. ``save_hf`` is a function; a test compares
its signature with :class:`CallOptions`. What an option means is written into the doors' docstrings from here.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from xhf_hooks.errors import OptionError, UnknownOptionError

DTYPE_CODES = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16'}
LORA_MODES = ('adapter', 'merge', 'both')
LLAVA_FORMATS = ('xtuner', 'xtuner_complete', 'huggingface')
VERIFY_LEVELS = ('off', 'sizes', 'full')
WRITERS = ('auto', 'positional', 'parallel', 'stream', 'gather')
SAVE_STRATEGIES = ('no', 'steps', 'epoch')

_SIZE_UNITS = {'': 1, 'B': 1}
for _power, _letter in enumerate('KMGT', start=1):
    _SIZE_UNITS[f'{_letter}B'] = 10 ** (3 * _power)
    _SIZE_UNITS[f'{_letter}IB'] = 2 ** (10 * _power)

#: Gives an option's canonical value, or raises OptionError; called with the option's name and what was given.
Check = Callable[[str, Any], Any]


def _option(default: Any, meaning: str, check: Check) -> Any:
    return field(default=default, kw_only=True, metadata={'meaning': meaning, 'check': check})


# --- checks ---


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def one_of(*choices: str | None) -> Check:
    """One of a few words."""

    def check(option: str, value: Any) -> Any:
        if value not in choices:
            raise OptionError(option, f'one of {choices}', value)
        return value

    return check


def at_least(least: int, *others: int | None) -> Check:
    """A number, or one of ``others``."""
    words = ', '.join([*map(str, others), 'or ' * bool(others) + f'a number of at least {least}'])

    def check(option: str, value: Any) -> Any:
        if not (value is None and None in others) and (not _is_int(value) or (value < least and value not in others)):
            raise OptionError(option, words, value)
        return value

    return check


def switch(option: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise OptionError(option, 'True or False', value)
    return value


def maybe_switch(option: str, value: Any) -> bool | None:
    """None, True or False."""
    if value is not None and not isinstance(value, bool):
        raise OptionError(option, 'None, True or False', value)
    return value


def size(option: str, value: Any) -> int:
    """A number of bytes, as such or as ``'5GB'``; gives bytes."""
    try:
        return parse_size(value)
    except ValueError:
        raise OptionError(option, "a size such as '128MB' or a number of bytes", value) from None


def seconds(option: str, value: Any) -> float:
    """A time of at least 0 s."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise OptionError(option, 'seconds, at least 0', value)
    return float(value)


def dtype_code(option: str, value: Any) -> str | None:
    """``'bfloat16'``, ``torch.bfloat16`` or None; gives the dtype's code in safetensors files, or None."""
    if value is None:
        return None
    name = str(value).removeprefix('torch.')
    if name not in DTYPE_CODES:
        raise OptionError(option, f'None or one of {sorted(DTYPE_CODES)}', value)
    return DTYPE_CODES[name]


def folder(option: str, value: Any) -> Path | None:
    """The path of a folder, or None."""
    if value is None:
        return None
    if not isinstance(value, (str, Path)) or '://' in str(value) or not Path(value).name:
        raise OptionError(option, 'the path of a folder', value)
    return Path(value).expanduser()


def writer_name(option: str, value: Any) -> str:
    """'auto', one of ours, or one that somebody has registered."""
    from xhf_hooks.registry import WRITERS as REGISTERED

    return one_of(*dict.fromkeys([*WRITERS, *REGISTERED.module_dict]))(option, value)


def dotted_path(option: str, value: Any) -> str | None:
    """The path of a module; whether the model has it is known before the first step."""
    if value is not None and (not isinstance(value, str) or not value):
        raise OptionError(option, 'None or a dotted path such as "llm"', value)
    return value


def tokenizer_like(option: str, value: Any) -> Any:
    """A tokenizer or what one can be built from, which happens before the first step."""
    is_folder = isinstance(value, (str, Path)) and str(value) not in ('', '.')
    known = value is None or is_folder or hasattr(value, 'save_pretrained')
    if not known and not (isinstance(value, dict) and 'type' in value):
        raise OptionError(option, 'a tokenizer, a config with a type, or a folder', value)
    return value


def anything(option: str, value: Any) -> Any:
    """What is checked elsewhere."""
    return value


def parse_size(size: int | str) -> int:
    """Bytes of a size such as ``128_000_000``, ``'5GB'`` (powers of ten) or ``'5GiB'`` (powers of two).

    Raises:
        ValueError: It is not a positive size.
    """
    if isinstance(size, str):
        match = re.fullmatch(r'\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*', size)
        unit = match and _SIZE_UNITS.get(match[2].upper())
        size = int(Fraction(match[1]) * unit) if match and unit else 0
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ValueError('not a size')
    return size


# --- options ---


class _Options:
    """What all classes of options have in common.

    Raises:
        OptionError: A bad value, a bad combination, or an option that is not there.
    """

    def __post_init__(self) -> None:
        for option in fields(self):  # type: ignore[arg-type]
            setattr(self, option.name, option.metadata['check'](option.name, getattr(self, option.name)))


@dataclass(eq=False)
class SaveOptions(_Options):
    """What is saved and how: of every door, and all that a :class:`xhf_hooks.save.Saver` needs.

    Attributes hold checked values: sizes in bytes, dtypes as codes of safetensors files.
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
    bucket_size: int | str = _option('128MB', 'How much is gathered and written at once; memory follows it.', size)
    writer: str = _option(
        'auto',
        "'positional' (every rank writes its own slices), 'parallel' (every rank writes whole tensors, of which the "
        "others send it their slices), 'stream' (the same, but rank 0 alone writes), 'gather' (every rank receives "
        "every tensor, and rank 0 writes) or 'auto': 'positional' where all ranks see the folder, else 'stream'. The "
        'files are the same.',
        writer_name,
    )
    verify: str = _option(
        'sizes',
        "What is looked at before a save is committed. 'off': that every byte was written. 'sizes': file sizes and "
        "headers, too, and some of what each rank has written, read by another. 'full': every byte is read back from "
        'the disk and compared with checksums taken from memory.',
        one_of(*VERIFY_LEVELS),
    )
    max_keep_ckpts: int = _option(
        1,
        'How many saves to keep, the newest included; the older ones are named ``hf_model_iter_500`` or '
        '``hf_model_epoch_2``. -1 keeps all.',
        at_least(1, -1),
    )

    @property
    def max_shard_nbytes(self) -> int:
        return parse_size(self.max_shard_size)

    @property
    def bucket_nbytes(self) -> int:
        return parse_size(self.bucket_size)


@dataclass(eq=False)
class CallOptions(SaveOptions):
    """Of ``save_hf``: the caller waits, and is told of errors."""

    async_save: ClassVar[bool] = False
    async_busy: ClassVar[str] = 'wait'
    exit_wait_secs: ClassVar[float] = 600.0
    on_error: ClassVar[str] = 'raise'

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
            "(MMEngine's ``work_dir/<timestamp>``, Trainer's ``output_dir``).",
            'check': folder,
        },
    )
    save_last: bool = _option(True, 'Save when training ends, whatever is due.', switch)
    async_save: bool = _option(
        False,
        'Copy what is to be saved to host memory, which takes as many bytes on each rank as it writes, and write it '
        'while training goes on.',
        switch,
    )
    async_busy: str = _option(
        'wait', "'wait' or 'skip' a save that is due while the one before is being written.", one_of('wait', 'skip')
    )
    exit_wait_secs: float = _option(
        600,
        'How long the end of the process (an exception, SIGTERM) waits for a save that is being written. torchrun '
        'follows SIGTERM with SIGKILL after 30 s whatever is set here, unless it is started with '
        '``--shutdown-timeout`` (torch 2.13 has it; older ones always kill after 30 s).',
        seconds,
    )
    on_error: str = _option('continue', "'continue' or 'raise', when a save fails.", one_of('continue', 'raise'))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.async_busy != 'wait' and not self.async_save:
            raise OptionError('async_busy', "'wait' when async_save is False", self.async_busy)


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
        maybe_switch,
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by_epoch is not None and self.interval is None:
            raise OptionError('by_epoch', 'None when interval is None, which follows CheckpointHook', self.by_epoch)
        if self.interval == -1 and not self.save_last and self.save_best is None:
            expected = 'a number, or save_last or save_best: like this nothing is ever saved'
            raise OptionError('interval', expected, self.interval)
        if self.rule is not None and self.save_best is None:
            raise OptionError('rule', 'None when save_best is None', self.rule)


@dataclass(eq=False)
class CallbackOptions(RunOptions):
    """Of ``HFCheckpointCallback``; names are those of TrainingArguments where it has one."""

    save_strategy: str | None = _option(
        None,
        "'no' (only at the end), 'steps' or 'epoch'. None: whenever Trainer itself saves a checkpoint.",
        one_of(None, *SAVE_STRATEGIES),
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
        if self.save_strategy == 'no' and not self.save_last:
            raise OptionError('save_strategy', 'another one, or save_last: like this nothing is ever saved', 'no')


# --- what doors show of them ---


def require_known(door: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a misspelt option.

    Raises:
        UnknownOptionError: It names the nearest one.
    """
    known = [name for name in known if name != 'self']
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f'did you mean {near[0]}?' if near else f'it has {", ".join(known)}'
            raise UnknownOptionError(name, door, hint)


def in_reading_order(options: type) -> list[Field[Any]]:
    """Its options: where saves go, then what is its own, then what it has from others."""
    found = {option.name: option for base in options.__mro__ for option in _own_fields(base)}
    return sorted(found.values(), key=lambda option: option.name != 'out_dir')


def _own_fields(cls: type) -> list[Field[Any]]:
    names = inspect.get_annotations(cls)
    return [option for option in fields(cls) if option.name in names] if is_dataclass(cls) else []


def with_options(doc: str | None, options: type) -> str:
    """A docstring with all options in its section ``Args``, which is before ``Returns`` and ``Examples``."""
    lines = []
    for option in in_reading_order(options):
        meaning = f'{option.name} ({option.type}): {option.metadata["meaning"]} Defaults to {option.default!r}.'
        lines += textwrap.wrap(meaning, 112, initial_indent=' ' * 8, subsequent_indent=' ' * 12)
    doc = inspect.cleandoc(doc or '')
    section = inspect.cleandoc('\n'.join(lines))
    before, mark, after = next(
        (parts for mark in ('Returns:', 'Examples:') if (parts := doc.partition(f'\n{mark}'))[1]), (doc, '', '')
    )
    head = '' if '\nArgs:\n' in before else '\nArgs:\n'
    return f'{before.rstrip()}\n{head}{textwrap.indent(section, "    ")}\n{mark}{after}'


_Function = TypeVar('_Function', bound=Callable[..., Any])
_Class = TypeVar('_Class', bound=type)


def door_function(options: type) -> Callable[[_Function], _Function]:
    """Decorates a function that takes ``options`` by their names: explains them, and refuses misspelt ones."""

    def decorate(function: _Function) -> _Function:
        checked = _refusing_misspelt(function, function.__name__)
        checked.__doc__ = with_options(function.__doc__, options)
        return checked

    return decorate


def door_class(cls: _Class) -> _Class:
    """Decorates a class that inherits its options: explains them, and refuses misspelt ones."""
    cls.__init__ = _refusing_misspelt(cls.__init__, cls.__name__)  # type: ignore[misc]
    cls.__doc__ = with_options(cls.__doc__, cls)
    return cls


def _refusing_misspelt(function: _Function, name: str) -> _Function:
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        require_known(name, given, known)
        return function(*args, **given)

    return checked  # type: ignore[return-value]
