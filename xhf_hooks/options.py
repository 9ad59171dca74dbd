"""The options of each frontend, each described once: default, meaning, check. docs/options.md is made from them.

``HFCheckpointHook`` holds :class:`HookOptions` and ``HFCheckpointCallback`` holds :class:`CallbackOptions`; the fields
are what they take. ``save_hf`` is a function; a test compares its signature with :class:`CallOptions`. The descriptions
in Chinese are in docs/zh_cn/options.json.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args
from urllib.parse import unquote, urlsplit

from xhf_hooks.errors import OptionError
from xhf_hooks.format.safetensors import AS_IN_BASE
from xhf_hooks.places.hub_bucket import is_bucket_url
from xhf_hooks.system.versions import require_packages

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPE_CODES = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16'}
CarryBase = Literal['all']
LlavaFormat = Literal['xtuner', 'huggingface']
LoraMode = Literal['adapter', 'merge', 'both']
VerifyLevel = Literal['sizes', 'full']
WriterName = Literal['auto', 'positional', 'parallel', 'stream', 'gather']
CARRY_BASE = get_args(CarryBase)
LLAVA_FORMATS = get_args(LlavaFormat)
LORA_MODES = get_args(LoraMode)
VERIFY_LEVELS = get_args(VerifyLevel)
#: Signals that can request a save. The first two do nothing else; the others also end the process.
SIGNALS = ('SIGUSR1', 'SIGUSR2', 'SIGTERM', 'SIGINT', 'SIGHUP', 'SIGXCPU')

#: What a size is, for messages.
SIZE = "a size such as '128MB' or a number of bytes"
_UNITS = {'': 1, **{unit: 1000**power for power, unit in enumerate(('B', 'KB', 'MB', 'GB', 'TB'))}}
_UNITS |= {unit: 1024**power for power, unit in enumerate(('KIB', 'MIB', 'GIB', 'TIB'), start=1)}

_URL = re.compile(r'[a-z][a-z0-9+.-]*://.+', re.IGNORECASE)

#: Called with an option's name and value; returns the value, perhaps in another form, or raises OptionError.
Check = Callable[[str, Any], Any]


def _must_be(expected: str, accepts: Callable[[Any], bool]) -> Check:
    def check(option: str, value: Any) -> Any:
        if not accepts(value):
            raise OptionError(option, expected, value)
        return value

    return check


def _one_of(*choices: Any) -> Check:
    return _must_be(f'one of {choices}', lambda value: value in choices)


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _at_least(least: int, *others: int) -> Check:
    expected = ' or '.join([f'an integer of at least {least}', *map(str, others)])
    return _must_be(expected, lambda value: _is_number(value, int) and (value >= least or value in others))


_switch = _one_of(True, False)
_minutes = _must_be('a number of minutes, more than 0', lambda value: _is_number(value, int, float) and value > 0)
_seconds = _must_be('a number of seconds, at least 0', lambda value: _is_number(value, int, float) and value >= 0)
_dotted_path = _must_be('a dotted path such as "llm"', lambda value: isinstance(value, str) and value != '')
_tokenizer = _must_be(
    'a tokenizer, a config with the key type, or a folder',
    lambda value: (
        hasattr(value, 'save_pretrained')
        or (isinstance(value, dict) and 'type' in value)
        or (isinstance(value, (str, Path)) and str(value) not in ('', '.'))
    ),
)
_anything = _must_be('anything', lambda value: True)  # checked where it is used


def parse_size(size: int | str) -> int:
    """Bytes of a size such as ``128_000_000``, ``'5GB'`` (powers of ten) or ``'5GiB'`` (powers of two).

    Raises:
        ValueError: It is not a positive size.
    """
    if isinstance(size, str):
        match = re.fullmatch(r'\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*', size)
        size = int(Decimal(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if not _is_number(size, int) or size <= 0:
        raise ValueError('not a size')
    return size


def _size(option: str, value: Any) -> int:
    try:
        return parse_size(value)
    except ValueError:
        raise OptionError(option, SIZE, value) from None


def _signal_names(option: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(name in SIGNALS for name in names):
        raise OptionError(option, f'None, or one or more of {SIGNALS}', value)
    return tuple(dict.fromkeys(names))


def _iterations(option: str, value: Any) -> tuple[int, ...]:
    """Iterations in increasing order."""
    numbers = [*value] if isinstance(value, (list, tuple, range)) else []
    are_numbers = numbers and all(_is_number(number, int) for number in numbers)
    if not are_numbers or not all(before < number for before, number in pairwise([0, *numbers])):
        raise OptionError(option, 'a list of iterations from 1 on, each larger than the one before', value)
    return tuple(numbers)


def _command(option: str, value: Any) -> tuple[str, ...]:
    """The arguments of a command."""
    try:
        arguments = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise OptionError(option, f'a command with closed quotes ({error})', value) from None
    is_command = isinstance(arguments, (list, tuple)) and all(isinstance(argument, str) for argument in arguments)
    if not is_command or not arguments or not arguments[0]:
        raise OptionError(option, 'a command (a string or a list of strings)', value)
    return tuple(arguments)


def _dtype_code(option: str, value: Any) -> str:
    """The safetensors code of ``'bfloat16'`` or ``torch.bfloat16``; AS_IN_BASE itself."""
    name = str(value).removeprefix('torch.')
    if name not in DTYPE_CODES and name != AS_IN_BASE:
        raise OptionError(option, f'None, {AS_IN_BASE!r} or one of {sorted(DTYPE_CODES)}', value)
    return DTYPE_CODES.get(name, name)


def folder(option: str, value: Any) -> Path:
    """The path of a folder.

    Raises:
        OptionError: It is something else, such as the URL of an object store.
    """
    if isinstance(value, str) and '://' in value:
        raise OptionError(option, 'the path of a folder (upload_to sends saves to a store)', _without_secrets(value))
    if not isinstance(value, (str, Path)) or not Path(value).name:
        raise OptionError(option, 'the path of a folder', value)
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # ~name of a user who is not known here
        raise OptionError(option, f'the path of a folder ({error})', str(value)) from None


def require_apart(out_dir: Path, of_trainer: Path, trainer: str) -> None:
    """Refuse to replace the folder that a trainer writes into, or one that holds it. Runs on: all ranks.

    ``out_dir`` may lie inside that folder. Asks no file system, so that all ranks get the same answer.

    Args:
        of_trainer: The folder into which the trainer writes its checkpoints.
        trainer: What the trainer calls it, for the message.

    Raises:
        OptionError: ``out_dir`` is that folder, or holds it.
    """
    replaced, written = (Path(os.path.abspath(folder)) for folder in (out_dir, of_trainer))
    if replaced in (written, *written.parents):
        expected = f'a folder that neither is nor holds {of_trainer}, {trainer}, because a save replaces it as a whole'
        raise OptionError('out_dir', expected, str(out_dir))


def require_uploads_apart(upload_to: str, out_dir: Path) -> None:
    """Refuse to upload to where saves go, since both have the same names there. Runs on: any rank.

    Raises:
        OptionError: ``upload_to`` is the folder that holds ``out_dir``, or is in ``out_dir``.
    """
    url = urlsplit(upload_to)
    if url.scheme not in ('file', 'local'):
        return
    final, store = (Path(os.path.realpath(path)) for path in (out_dir, url.netloc + unquote(url.path)))
    if store == final.parent or final in (store, *store.parents):
        expected = f'another folder than {store}, where saves and uploads would delete each other'
        raise OptionError('upload_to', expected, upload_to)


def _store_url(option: str, value: Any) -> str:
    """The URL of an object store, without a final slash."""
    if not isinstance(value, str) or not _URL.fullmatch(value):
        raise OptionError(option, "a URL such as 's3://bucket/run'", value)
    if value.lower().startswith('hf://') and not is_bucket_url(value):  # the Hub would make a commit of each file
        expected = "an object store, or a bucket of the Hub such as 'hf://buckets/OWNER/NAME/run'"
        expected += " (for a repository of the Hub, use on_saved='hf upload ...', docs/on-saved.md)"
        raise OptionError(option, expected, value)
    url = urlsplit(value)
    if '@' in url.netloc or url.query:  # s3://key:secret@bucket, or a signed query
        expected = 'a URL without credentials and queries (docs/object-stores.md says where they go)'
        raise OptionError(option, expected, _without_secrets(value))
    return value.rstrip('/')


def _without_secrets(value: str) -> str:
    """A URL without credentials and queries."""
    url = urlsplit(value)
    return f'{url.scheme}://{url.netloc.rpartition("@")[2]}{url.path}'


def _library_arguments(option: str, value: Any) -> dict[str, Any]:
    """Keyword arguments for a library, as plain dicts."""
    if not isinstance(value, Mapping):
        raise OptionError(option, 'a dict of keyword arguments', value)
    if not all(isinstance(name, str) for name in value) or 'backend' in value:  # MMEngine's
        # The message has the names only: a value may be a secret
        raise OptionError(option, "keyword arguments of the store's library; the URL names the store", [*value])
    return {
        name: _library_arguments(option, each) if isinstance(each, Mapping) else each for name, each in value.items()
    }


def _option(default: Any, meaning: str, check: Check, *, is_advanced: bool = False) -> Any:
    """A field of an options class.

    Args:
        default: The value if the user gives none.
        meaning: What the option does.
        check: Accepts or refuses a value.
        is_advanced: Whether the pages list it under "Advanced", since hardly anybody changes it.
    """
    return field(default=default, metadata={'meaning': meaning, 'check': check, 'is_advanced': is_advanced})


_Documented = TypeVar('_Documented', bound=Callable[..., Any])


def documents_options(options: type[_Options]) -> Callable[[_Documented], _Documented]:
    """A decorator that shows the options in ``help()`` and on the API page.

    It adds their meanings to the docstring, and gives a class the signature of the options that it holds.
    """

    def explain(documented: _Documented) -> _Documented:
        lines = [f'    {option.name}: {option.metadata["meaning"]}' for option in in_reading_order(options)]
        documented.__doc__ = '\n'.join([inspect.cleandoc(documented.__doc__ or ''), '', 'Keyword Args:', *lines])
        if inspect.isclass(documented):
            documented.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
        return documented

    return explain


def in_reading_order(options: type) -> list[Field[Any]]:
    """The options of a class: out_dir, then its own, then inherited ones."""
    bases = reversed(options.__mro__)
    depth = {name: number for number, base in enumerate(bases) for name in inspect.get_annotations(base)}
    return sorted(fields(options), key=lambda option: (option.name != 'out_dir', -depth[option.name]))


class _Options:
    """Base of all option classes: checks each value, and keeps it in the form that the check returns.

    Raises:
        InstalledError: A package in ``needs`` is missing, or older than the oldest that works.
        OptionError: A value is invalid, or two options conflict.
    """

    needs: ClassVar[tuple[str, ...]] = ('torch', 'transformers')
    #: What other libraries, or an earlier version, call an option -> its name here; for messages.
    other_names: ClassVar[Mapping[str, str]] = {'backend_args': 'storage_options'}

    def __post_init__(self) -> None:
        require_packages(*self.needs)
        for option in fields(self):  # type: ignore[arg-type]
            value = getattr(self, option.name)
            if value is not None or option.default is not None:
                setattr(self, option.name, option.metadata['check'](option.name, value))

    @classmethod
    def of(cls, *values: Any, **given: Any) -> Self:
        """The options with these values.

        Raises:
            TypeError: There is no such option. For a name in ``other_names``, the message says what the option is
                called here.
            OptionError: As of the constructor.
        """
        for name in given.keys() & cls.other_names:
            raise TypeError(f'{cls.__name__} has no option {name!r}; here it is called {cls.other_names[name]!r}')
        return cls(*values, **given)

    def require_default(self, option: str, why: str, *, when: bool) -> None:
        """Refuse an option that would have no effect."""
        default, value = type(self).__dataclass_fields__[option].default, getattr(self, option)  # type: ignore
        if when and value != default:
            # Of a dict, the message has the names only: a value may be a secret
            raise OptionError(option, f'{default} {why}', [*value] if isinstance(value, dict) else value)


@dataclass(eq=False)
class SaveOptions(_Options):
    """What is saved and how. Every frontend has these options; a :class:`.SaveContext` needs no more.

    Attributes hold checked values: sizes in bytes, dtypes as safetensors codes.
    """

    _: KW_ONLY
    module: str | None = _option(
        None,
        'Dotted path of the PreTrainedModel inside the trained model. None: the model itself, ``llm``, or the only '
        'PreTrainedModel.',
        _dotted_path,
    )
    lora: LoraMode | None = _option(
        None,
        "For a model with a LoRA adapter: 'adapter' (the adapter alone, as peft saves it), 'merge' (the complete "
        "model with the adapter merged into its weights) or 'both' (the merged model, and the adapter in "
        "``hf_model/adapter``). None: 'adapter' if the model has one. For XTuner's reward models, 'adapter' puts the "
        "head into ``modules_to_save``, and None means 'merge', as in XTuner's converter, unless the base model is "
        'quantized.',
        _one_of(*LORA_MODES),
    )
    llava_format: LlavaFormat | None = _option(
        None,
        "Layout for XTuner's LLaVAModel: 'xtuner' (XTuner's own, without frozen parts) or 'huggingface' (transformers' "
        "LlavaForConditionalGeneration, complete, adapters merged). None: 'xtuner'.",
        _one_of(*LLAVA_FORMATS),
    )
    tokenizer: Any = _option(
        None,
        "A tokenizer, its MMEngine config, or its folder. None: the run's own (``model.tokenizer``, "
        "``cfg.tokenizer``, or Trainer's ``processing_class``), otherwise that of the base model. If there is "
        "neither, a warning is logged. If the run's config names an XTuner prompt template, the saved tokenizer gets a "
        'chat template that formats dialogues as in training, and generation_config gets its stop words.',
        _tokenizer,
    )
    dtype: str | None = _option(
        None,
        "'float32': the fp32 master weights where they exist. 'bfloat16' or 'float16': this dtype, except for "
        "tensors that ``from_pretrained`` keeps in fp32 when it loads with this dtype. 'base': each tensor as in the "
        "base model's safetensors files; a tensor that the base lacks gets the dtype of most of the base's elements, "
        'and adapters keep the dtype of training. None: the dtype of training. Tensors in another dtype than in '
        'training are rounded once from the fp32 master weights, where these exist.',
        _dtype_code,
    )
    carry_base: CarryBase | None = _option(
        None,
        "'all': copy tensors of the base model that the trained class does not load (layers for multi-token "
        'prediction of DeepSeek-V3, GLM-4.5, Qwen3-Next, MiMo) into each complete model. They are copied from the '
        "base's safetensors files byte for byte, as they were before training. Every rank must be able to read these "
        'files during each save. None: a warning names the tensors.',
        _one_of(*CARRY_BASE),
    )
    max_shard_size: int | str = _option('5GB', 'As in ``save_pretrained``.', _size)
    bucket_size: int | str = _option(
        '128MB',
        'How many bytes are gathered or sent at once. Peak extra memory is about one bucket.',
        _size,
        is_advanced=True,
    )
    writer: WriterName = _option(
        'auto',
        "'positional': every rank writes its own slices into the files. 'parallel': each file has one writer, and the "
        "other ranks send it their slices; a smaller ``max_shard_size`` gives more files, so more writers. 'stream': "
        "rank 0 writes everything, and the other ranks send it their slices. 'gather': every rank receives every "
        "tensor, and rank 0 writes. 'auto': 'positional' if all ranks see the folder, else 'stream'. All writers "
        'produce the same files.',
        _one_of(*get_args(WriterName)),
    )
    verify: VerifyLevel = _option(
        'sizes',
        "What is checked before a save is committed. 'sizes': every byte was written, the file sizes, and the headers. "
        "'full': also every byte, read back from the disk and compared with checksums taken from memory.",
        _one_of(*VERIFY_LEVELS),
    )
    max_keep_ckpts: int = _option(
        1,
        'How many saves to keep, including the newest and besides those of ``keep_every``. Older ones are named '
        '``hf_model_iter_500`` or ``hf_model_epoch_2``. -1 keeps all.',
        _at_least(1, -1),
    )
    model_card: bool = _option(
        True,
        'Write a model card (``README.md``) with the base model, the task, the step and the command to load, unless '
        'the folder has a card already: peft writes one for adapters. False: write none.',
        _switch,
    )
    async_save: bool = _option(
        False,
        'Copy the weights to host memory, then write the files while training goes on. The copy on each rank is as '
        'large as the data that the rank writes. If the next save is due before the files are written, it waits. '
        '``save_hf`` then returns a handle with ``result(timeout)`` and ``done()``.',
        _switch,
    )
    keep_every: int | None = _option(
        None,
        'Besides the newest saves (``max_keep_ckpts``, ``upload_keep``), keep the first save of every so many '
        'iterations for good. With 1000, this is the first save from iteration 1000 on, the first from 2000 on, and '
        'so on. The option counts iterations even if ``interval`` counts epochs. It does not apply to best saves. '
        '(In Orbax: ``EveryNSteps`` with ``exact_interval=False``.)',
        _at_least(1),
    )

    @property
    def max_shard_nbytes(self) -> int:
        """The size of the largest file of weights."""
        return parse_size(self.max_shard_size)

    @property
    def bucket_nbytes(self) -> int:
        """The size of a bucket: half of ``bucket_size``, since one is gathered while another waits for the disk."""
        return max(1, parse_size(self.bucket_size) // 2)


@dataclass(eq=False)
class CallOptions(SaveOptions):
    """Options of ``save_hf``, which raises the errors of its save, or hands them to the handle of one in flight."""

    save_last: ClassVar[bool] = False
    exit_wait_secs: ClassVar[float] = 600.0
    save_on_signal: ClassVar[tuple[str, ...]] = ()
    interval_minutes: ClassVar[float | None] = None
    save_at: ClassVar[None] = None
    on_saved: ClassVar[None] = None
    on_error: ClassVar[str] = 'raise'
    upload_to: ClassVar[str | None] = None
    upload_keep: ClassVar[int] = -1
    storage_options: ClassVar[None] = None

    _: KW_ONLY
    step: int | None = _option(
        None,
        'Number of finished optimizer steps. Required if more than one save is kept (``max_keep_ckpts``, '
        '``keep_every``), since older saves are named after their step.',
        _at_least(0),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step is None and (self.max_keep_ckpts != 1 or self.keep_every is not None):
            raise OptionError('step', 'an integer of at least 0 (None only when a single save is kept)', None)
        self.require_default('keep_every', 'when all saves are kept', when=self.max_keep_ckpts == -1)


@dataclass(eq=False)
class RunOptions(SaveOptions):
    """Options that the hook and the callback share."""

    out_dir: str | Path | None = _option(
        None,
        "Folder of the newest save. None: ``hf_model`` in the run's folder (MMEngine's ``work_dir/<timestamp>``, "
        "Trainer's ``output_dir``).",
        folder,
    )
    _: KW_ONLY
    interval_minutes: float | None = _option(
        None,
        "Also save when so many minutes have passed on rank 0's clock since training began, or since the last save "
        'to ``hf_model``, whatever caused it. All ranks save at the end of the next iteration. For saves by the clock '
        "alone: ``interval=-1`` (``save_strategy='no'`` for Trainer).",
        _minutes,
    )
    save_at: Sequence[int] | None = _option(
        None,
        'Also save at these iterations, such as ``[1, 2, 4, 8, 16]``, in increasing order. The option counts '
        'iterations even if ``interval`` counts epochs, and goes on counting after a resume. These saves are kept as '
        'others are: ``max_keep_ckpts=-1`` (``save_total_limit=None`` for Trainer) keeps all of them.',
        _iterations,
    )
    save_last: bool = _option(
        True,
        'Also save when training ends, unless the last weights are saved already.',
        _switch,
    )
    save_on_signal: str | Sequence[str] | None = _option(
        None,
        'A signal, or a list of signals, that requests a save. If any rank gets the signal, all ranks save about a '
        'second later; at the end of the next iteration, if that takes longer; or at the end of the current '
        "validation. After 'SIGUSR1' and 'SIGUSR2' training goes on; 'SIGTERM' (preemption), 'SIGINT', 'SIGHUP' and "
        "'SIGXCPU' end the process once the save is committed.",
        _signal_names,
    )
    on_saved: str | Sequence[str] | None = _option(
        None,
        'A command that rank 0 runs after each save, while training goes on. ``{path}`` is the saved folder, '
        '``{step}`` the iteration, ``{label}`` a name such as ``iter_500``, and ``{output}`` a folder for results. '
        'If a line of its output is a JSON object, the numbers in the last such line go to the visualizer, or to the '
        '``log_history`` of Trainer. If several saves are made while the command runs, it runs next for the newest '
        'one. It is ended after a day; ``timeout 1h COMMAND`` ends it sooner.',
        _command,
    )
    exit_wait_secs: float = _option(
        600,
        'How long a process that is ending (after an exception, SIGTERM, SIGHUP or SIGXCPU) waits for a save in '
        'progress and for uploads, and how long the end of training waits for uploads and for ``on_saved``. '
        'torchrun sends SIGKILL 30 s after SIGTERM regardless; torch 2.13 can change that with ``--shutdown-timeout``.',
        _seconds,
        is_advanced=True,
    )
    upload_to: str | None = _option(
        None,
        "URL of an object store, such as 's3://bucket/run' (gs, az, oss and all else that fsspec supports), or of a "
        "storage bucket of the Hub, 'hf://buckets/OWNER/NAME/run'. Each committed save is uploaded in the background, "
        'under a prefix of the run, such as ``20261127_201530_3f9a1c/hf_model_iter_500``. ``hf_model.json`` next to it '
        'names the newest save.',
        _store_url,
    )
    upload_keep: int = _option(
        -1,
        'How many uploaded saves of this run to keep, including the newest and besides those of ``keep_every``. -1 '
        'keeps all.',
        _at_least(1, -1),
    )
    storage_options: dict[str, Any] | None = _option(
        None,
        "Keyword arguments for the library of the store in ``upload_to``, such as ``dict(endpoint_url='https://...')``."
        ' Keep credentials where that library looks for them, not here.',
        _library_arguments,
    )
    on_error: Literal['continue', 'raise'] = _option(
        'continue',
        "When a save fails: 'continue' (log the error and go on training) or 'raise'.",
        _one_of('continue', 'raise'),
    )

    def is_saved_at(self, iteration: int) -> bool:
        """Whether ``save_at`` names this iteration."""
        return iteration in (self.save_at or ())

    def has_unscheduled_saves(self, last: int) -> bool:
        """Whether saves may be made besides those of a schedule and of best scores.

        Args:
            last: The last iteration.
        """
        is_at_an_iteration = self.save_at is not None and self.save_at[0] <= last
        may_be_requested = bool(self.save_on_signal) or self.interval_minutes is not None
        return self.save_last or is_at_an_iteration or may_be_requested

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ('upload_keep', 'storage_options'):
            self.require_default(option, 'unless upload_to is a store', when=self.upload_to is None)
        keeps_all = self.max_keep_ckpts == -1 and self.upload_keep == -1
        self.require_default('keep_every', 'when all saves are kept', when=keeps_all)


@dataclass(eq=False)
class HookOptions(RunOptions):
    """Options of ``HFCheckpointHook``, named as in MMEngine where it has the same option."""

    needs: ClassVar[tuple[str, ...]] = ('torch', 'transformers', 'mmengine')

    _: KW_ONLY
    interval: int | None = _option(
        None,
        'Number of epochs or iterations between saves. -1: no such schedule; other options, such as ``save_last`` and '
        "``interval_minutes``, still save. None: as in the run's CheckpointHook, with its ``save_begin``.",
        _at_least(1, -1),
    )
    by_epoch: bool | None = _option(
        None,
        'Whether ``interval`` counts epochs or iterations. None: as the train loop does, epochs in EpochBasedTrainLoop '
        'and iterations in IterBasedTrainLoop.',
        _switch,
    )
    save_best: str | list[str] | None = _option(
        None,
        'As in CheckpointHook. The best model goes to ``hf_model_best``, or with several metrics to '
        '``hf_model_best_<metric>``. A model is saved there if its score beats the best so far; after a resume, also '
        'the best of the earlier run. Rank 0 compares the scores. Scores come from validation during training. If '
        'the first validation lacks the metric, that is an error.',
        _anything,
    )
    rule: str | list[str] | None = _option(None, 'As in CheckpointHook.', _anything)
    ema: bool = _option(
        True,
        'If the run has an EMAHook, save its averaged weights. Validation scores these weights, and CheckpointHook '
        'saves them. False: save the live weights.',
        _switch,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        is_none = self.interval is None
        self.require_default('by_epoch', 'when interval is None, which follows CheckpointHook', when=is_none)
        self.require_default('rule', 'when save_best is None', when=self.save_best is None)


@dataclass(eq=False)
class CallbackOptions(RunOptions):
    """Options of ``HFCheckpointCallback``, named as in TrainingArguments where it has the same option."""

    other_names: ClassVar[Mapping[str, str]] = {**RunOptions.other_names, 'max_keep_ckpts': 'save_total_limit'}
    llava_format: ClassVar[None] = None  # type: ignore[misc]  # an option for XTuner's models

    _: KW_ONLY
    save_strategy: Literal['no', 'steps', 'epoch'] | None = _option(
        None,
        "'steps', 'epoch', or 'no' for no such schedule; other options, such as ``save_last`` and "
        '``interval_minutes``, still save. None: whenever Trainer itself saves a checkpoint.',
        _one_of('no', 'steps', 'epoch'),
    )
    save_steps: int | None = _option(
        None,
        "With ``save_strategy='steps'``, the number of steps between saves. None: as in TrainingArguments.",
        _at_least(1),
    )
    save_total_limit: int | None = _option(
        1,
        'How many saves to keep, including the newest and besides those of ``keep_every``. Older ones are named '
        '``hf_model_iter_500``. None keeps all. '
        'The limit of TrainingArguments does not apply here: it is for checkpoints to resume from.',
        _must_be(
            'an integer of at least 1, or None', lambda value: value is None or (_is_number(value, int) and value >= 1)
        ),
    )
    #: The same limit in MMEngine's words, in which saves read it. As a class variable it is no option of the callback.
    max_keep_ckpts: ClassVar[Any] = property(  # type: ignore[misc]
        lambda self: -1 if self.save_total_limit is None else self.save_total_limit
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        by_steps = self.save_strategy == 'steps'
        self.require_default('save_steps', "unless save_strategy is 'steps'", when=not by_steps)
