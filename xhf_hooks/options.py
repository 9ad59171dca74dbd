"""The options of each frontend, each described once: default, meaning, check. docs/options.md is made from them.

``HFCheckpointHook`` inherits from :class:`HookOptions` and ``HFCheckpointCallback`` from :class:`CallbackOptions`, so
their signatures are the fields below. ``save_hf`` is a function; a test compares its signature with
:class:`CallOptions`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields, is_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args
from urllib.parse import unquote, urlsplit

from xhf_hooks.errors import OptionError
from xhf_hooks.format.safetensors import AS_IN_BASE
from xhf_hooks.places.hub_bucket import is_bucket_url
from xhf_hooks.system.versions import require_packages

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


def _option(default: Any, meaning: str, check: Check, *, zh: str, is_advanced: bool = False) -> Any:
    """A field of an options class.

    Args:
        default: The value if the user gives none.
        meaning: What the option does, in English.
        check: Accepts or refuses a value.
        zh: What the option does, in Chinese, for docs/zh_cn/options.md.
        is_advanced: Whether the pages list it under "Advanced", since hardly anybody changes it.
    """
    return field(default=default, metadata={'meaning': meaning, 'zh': zh, 'check': check, 'is_advanced': is_advanced})


_Documented = TypeVar('_Documented', bound=Callable[..., Any])


def explains(options: type[_Options]) -> Callable[[_Documented], _Documented]:
    """A decorator that adds the meaning of each option to a docstring, for ``help()``, editors and the API page."""

    def explain(documented: _Documented) -> _Documented:
        lines = [f'    {option.name}: {option.metadata["meaning"]}' for option in in_reading_order(options)]
        documented.__doc__ = '\n'.join([inspect.cleandoc(documented.__doc__ or ''), '', 'Keyword Args:', *lines])
        if inspect.isclass(documented):
            documented.__init__ = _refusing_other_names(documented.__init__, options)  # type: ignore[method-assign]
        return documented

    return explain


def _refusing_other_names(init: Callable[..., None], options: type[_Options]) -> Callable[..., None]:
    """The constructor, with an error that names the option that was probably meant."""
    names = [option.name for option in fields(options)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: Any, *values: Any, **given: Any) -> None:
        for name in given.keys() - names:
            close = difflib.get_close_matches(name, names, n=1)
            meant = f'; did you mean {close[0]!r}?' if close else ''
            if name in options.other_names:
                meant = f'; here it is called {options.other_names[name]!r}'
            raise TypeError(f'{type(self).__name__} has no option {name!r}{meant}')
        init(self, *values, **given)

    return checked


def in_reading_order(options: type) -> list[Field[Any]]:
    """The options of a class: out_dir, then its own, then inherited ones."""
    classes = [base for base in options.__mro__ if is_dataclass(base)]
    names = {option.name for option in fields(options)}
    found = {o.name: o for base in classes for o in fields(base) if o.name in inspect.get_annotations(base)}
    of_class = [option for name, option in found.items() if name in names]
    return sorted(of_class, key=lambda option: option.name != 'out_dir')


class _Options:
    """Base of all option classes: checks each value, and keeps it in the form that the check returns.

    Raises:
        InstalledError: A package is too old for any of them.
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

    def require_default(self, option: str, why: str, *, when: bool) -> None:
        """Refuse an option that would have no effect."""
        default, value = type(self).__dataclass_fields__[option].default, getattr(self, option)  # type: ignore
        if when and value != default:
            # Of a dict, the message has the names only: a value may be a secret
            raise OptionError(option, f'{default} {why}', [*value] if isinstance(value, dict) else value)


@dataclass(eq=False)
class SaveOptions(_Options):
    """What is saved and how. Every frontend has these options; a :class:`xhf_hooks.saves.save.Saver` needs no more.

    Attributes hold checked values: sizes in bytes, dtypes as safetensors codes.
    """

    _: KW_ONLY
    module: str | None = _option(
        None,
        'Dotted path of the PreTrainedModel inside the trained model. None: the model itself, ``llm``, or the only '
        'PreTrainedModel.',
        _dotted_path,
        zh=(
            '要保存的 PreTrainedModel 在训练模型中的路径，用点分隔。None：模型本身、``llm``，或唯一的 PreTrainedModel。'
        ),
    )
    lora: LoraMode | None = _option(
        None,
        "For a model with a LoRA adapter: 'adapter' (the adapter alone, as peft saves it), 'merge' (the complete "
        "model with the adapter merged into its weights) or 'both' (the merged model, and the adapter in "
        "``hf_model/adapter``). None: 'adapter' if the model has one. For XTuner's reward models, 'adapter' puts the "
        "head into ``modules_to_save``, and None means 'merge', as in XTuner's converter, unless the base model is "
        'quantized.',
        _one_of(*LORA_MODES),
        zh=(
            "用于带 LoRA adapter 的模型：'adapter'（只保存 adapter，与 peft 相同）、'merge'（保存完整的模型，adap"
            "ter 合并到权重中）或 'both'（保存合并后的模型，另外把 adapter 保存到 ``hf_model/adapter``）。None："
            "模型有 adapter 时为 'adapter'。对 XTuner 的奖励模型，'adapter' 把打分头放进 ``modules_to_save``，Non"
            "e 表示 'merge'（与 XTuner 的转换工具相同），量化的基座除外。"
        ),
    )
    llava_format: LlavaFormat | None = _option(
        None,
        "Layout for XTuner's LLaVAModel: 'xtuner' (XTuner's own, without frozen parts) or 'huggingface' (transformers' "
        "LlavaForConditionalGeneration, complete, adapters merged). None: 'xtuner'.",
        _one_of(*LLAVA_FORMATS),
        zh=(
            "XTuner 的 LLaVAModel 保存成什么格式：'xtuner'（XTuner 自己的目录结构，不含冻结的部分）或 'huggingfac"
            "e'（transformers 的 LlavaForConditionalGeneration，完整的模型，adapter 已合并）。None：'xtuner'。"
        ),
    )
    tokenizer: Any = _option(
        None,
        "A tokenizer, its MMEngine config, or its folder. None: the run's own (``model.tokenizer``, "
        "``cfg.tokenizer``, or Trainer's ``processing_class``), otherwise that of the base model. If there is "
        "neither, a warning is logged. If the run's config names an XTuner prompt template, the saved tokenizer gets a "
        'chat template that formats dialogues as in training, and generation_config gets its stop words.',
        _tokenizer,
        zh=(
            'tokenizer 对象、tokenizer 的 MMEngine 配置，或 tokenizer 的目录。None：使用训练自己的 tokenizer'
            '（``model.tokenizer``、``cfg.tokenizer``，或 Trainer 的 ``processing_class``），没有时用基座模型的；'
            '都没有时在日志中给出警告。'
            '如果训练配置指定了 XTuner 的 prompt template，保存的 tokenizer 会带上与训练一致的对话模板，gen'
            'eration_config 会带上它的停止词。'
        ),
    )
    dtype: str | None = _option(
        None,
        "'float32': the fp32 master weights where they exist. 'bfloat16' or 'float16': this dtype, except for "
        "tensors that ``from_pretrained`` keeps in fp32 when it loads with this dtype. 'base': each tensor as in the "
        "base model's safetensors files; a tensor that the base lacks gets the dtype of most of the base's elements, "
        'and adapters keep the dtype of training. None: the dtype of training. Tensors that are written in fp32 come '
        'from the master weights where they exist.',
        _dtype_code,
        zh=(
            "'float32'：有 fp32 主权重的张量用主权重。'bfloat16' 或 'float16'：使用该 dtype，但 ``from_pretrained"
            "`` 用该 dtype 加载时保持 fp32 的张量除外。'base'：每个张量与基座模型的 safetensors 文件相同；基座没"
            '有的张量用基座中多数元素的 dtype，adapter 保持训练时的 dtype。None：训练的 dtype。以 fp32 写出的张量'
            '，有主权重时取自主权重。'
        ),
    )
    carry_base: CarryBase | None = _option(
        None,
        "'all': copy tensors of the base model that the trained class does not load (layers for multi-token "
        'prediction of DeepSeek-V3, GLM-4.5, Qwen3-Next, MiMo) into each complete model. They are copied from the '
        "base's safetensors files byte for byte, as they were before training. Every rank must be able to read these "
        'files during each save. None: a warning names the tensors.',
        _one_of(*CARRY_BASE),
        zh=(
            "'all'：把训练的模型类不加载、但基座模型里有的张量（DeepSeek-V3、GLM-4.5、Qwen3-Next、MiMo 的多 token"
            ' 预测层）复制到每个完整的模型中。张量从基座的 safetensors 文件逐字节复制，与训练之前相同。每次保存时'
            '，每个 rank 都必须能读取这些文件。None：在警告中列出这些张量。'
        ),
    )
    max_shard_size: int | str = _option('5GB', 'As in ``save_pretrained``.', _size, zh='与 ``save_pretrained`` 相同。')
    bucket_size: int | str = _option(
        '128MB',
        'How many bytes are gathered or sent at once. Peak extra memory is about one bucket.',
        _size,
        zh='一次 gather 或发送的字节数。额外内存的峰值约为一个桶。',
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
        zh=(
            "'positional'：每个 rank 把自己的分片写入文件。'parallel'：每个文件由一个 rank 写，其他 rank 把分片发"
            "给它；``max_shard_size`` 越小，文件越多，写文件的 rank 也越多。'stream'：全部由 rank 0 写，其他 rank"
            " 把分片发给它。'gather'：每个 rank 都收到所有张量，由 rank 0 写。'auto'：所有 rank 都能看到保存目录"
            "时为 'positional'，否则为 'stream'。各种方式写出的文件相同。"
        ),
    )
    verify: VerifyLevel = _option(
        'sizes',
        "What is checked before a save is committed. 'sizes': every byte was written, the file sizes, and the headers. "
        "'full': also every byte, read back from the disk and compared with checksums taken from memory.",
        _one_of(*VERIFY_LEVELS),
        zh=(
            "提交之前检查的内容。'sizes'：每个字节都已写入，文件大小和文件头正确。'full'：另外从磁盘读回所有数据"
            '，与在内存中计算的校验和比较。'
        ),
    )
    max_keep_ckpts: int = _option(
        1,
        'How many saves to keep, including the newest and besides those of ``keep_every``. Older ones are named '
        '``hf_model_iter_500`` or ``hf_model_epoch_2``. -1 keeps all.',
        _at_least(1, -1),
        zh=(
            '最多保留多少个保存的模型，包括最新的，不包括 ``keep_every`` 保留的。之前的目录名为 ``hf_model_iter_500`` '
            '或 ``hf_model_epoch_2``。-1 表示全部保留。'
        ),
    )
    model_card: bool = _option(
        True,
        'Write a model card (``README.md``) with the base model, the task, the step and the command to load, unless '
        'the folder has a card already: peft writes one for adapters. False: write none.',
        _switch,
        zh=(
            '写一份模型卡片（``README.md``）：基座模型、任务、步数和加载命令。目录中已有卡片时不写，例如 peft 为 '
            'adapter 写的卡片。False：不写。'
        ),
    )
    keep_every: int | None = _option(
        None,
        'Besides the newest saves (``max_keep_ckpts``, ``upload_keep``), keep the first save of every so many '
        'iterations for good. With 1000, this is the first save from iteration 1000 on, the first from 2000 on, and '
        'so on. The option counts iterations even if ``interval`` counts epochs. It does not apply to best saves. '
        '(In Orbax: ``EveryNSteps`` with ``exact_interval=False``.)',
        _at_least(1),
        zh=(
            '除最新的模型（``max_keep_ckpts``、``upload_keep``）之外，每隔多少次迭代永久保留一个模型。设为 1000 '
            '时，保留第 1000 次迭代起第一次保存的模型、第 2000 次迭代起第一次保存的模型，依此类推。即使 ``interva'
            'l`` 按 epoch 计数，这里也按迭代计数。对最优权重不起作用。（相当于 Orbax 的 ``EveryNSteps``，``exact_'
            'interval=False``。）'
        ),
    )


@dataclass(eq=False)
class CallOptions(SaveOptions):
    """Options of ``save_hf``, which blocks until the save is committed and raises its errors."""

    save_last: ClassVar[bool] = False
    async_save: ClassVar[bool] = False
    exit_wait_secs: ClassVar[float] = 600.0
    save_on_signal: ClassVar[tuple[str, ...]] = ()
    interval_minutes: ClassVar[float | None] = None
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
        zh='已完成的优化器步数。保留多个模型时（``max_keep_ckpts``、``keep_every``）必须给出，因为之前的目录以步数命名。',
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
        zh=(
            '最新模型的保存目录。None：训练目录下的 ``hf_model``（MMEngine 的 ``work_dir/<timestamp>``，Trainer '
            '的 ``output_dir``）。'
        ),
    )
    _: KW_ONLY
    interval_minutes: float | None = _option(
        None,
        "Also save when so many minutes have passed on rank 0's clock since training began, or since the last save "
        'to ``hf_model``, whatever caused it. All ranks save at the end of the next iteration. For saves by the clock '
        "alone: ``interval=-1`` (``save_strategy='no'`` for Trainer).",
        _minutes,
        zh=(
            '距训练开始或上一次保存到 ``hf_model``（无论由什么触发）超过这么多分钟时，也保存一次，以 rank 0 的时'
            "间为准。所有 rank 在下一次迭代结束时保存。只按时间保存：``interval=-1``（Trainer：``save_strategy='n"
            "o'``）。"
        ),
    )
    save_last: bool = _option(
        True,
        'Also save when training ends, unless the last weights are saved already.',
        _switch,
        zh='训练结束时也保存一次；如果最后的权重已经保存，就不再保存。',
    )
    async_save: bool = _option(
        False,
        'Copy the weights to host memory, then write the files while training goes on. The copy on each rank is as '
        'large as the data that the rank writes. If the next save is due before the files are written, it waits.',
        _switch,
        zh=(
            '先把权重复制到主机内存，然后在训练继续的同时写文件。每个 rank 上的副本与它要写的数据一样大。如果文件'
            '还没写完就到了下一次保存，下一次保存会等待。'
        ),
    )
    save_on_signal: str | Sequence[str] | None = _option(
        None,
        'A signal, or a list of signals, that requests a save. If any rank gets the signal, all ranks save about a '
        'second later; at the end of the next iteration, if that takes longer; or at the end of the current '
        "validation. After 'SIGUSR1' and 'SIGUSR2' training goes on; 'SIGTERM' (preemption), 'SIGINT', 'SIGHUP' and "
        "'SIGXCPU' end the process once the save is committed.",
        _signal_names,
        zh=(
            '用于请求保存的一个或多个信号。任何一个 rank 收到信号后，所有 rank 都会在大约一秒之后保存；迭代更长时'
            "，在下一次迭代结束时保存；验证期间，在验证结束时保存。收到 'SIGUSR1' 和 'SIGUSR2' 时，训练继续；收到 "
            "'SIGTERM'（抢占）、'SIGINT'、'SIGHUP' 和 'SIGXCPU' 时，提交之后结束进程。"
        ),
    )
    on_saved: str | Sequence[str] | None = _option(
        None,
        'A command that rank 0 runs after each save, while training goes on. ``{path}`` is the saved folder, '
        '``{step}`` the iteration, ``{label}`` a name such as ``iter_500``, and ``{output}`` a folder for results. '
        'If a line of its output is a JSON object, the numbers in the last such line go to the visualizer, or to the '
        '``log_history`` of Trainer. If several saves are made while the command runs, it runs next for the newest '
        'one. It is ended after a day; ``timeout 1h COMMAND`` ends it sooner.',
        _command,
        zh=(
            '每次保存之后由 rank 0 执行的命令，训练同时继续。``{path}`` 是保存的目录，``{step}`` 是迭代数，``{lab'
            'el}`` 是 ``iter_500`` 这样的名字，``{output}`` 是存放结果的目录。如果命令的输出中有 JSON 对象，最后'
            '一个这样的行中的数值会写入可视化器，或 Trainer 的 ``log_history``。如果命令执行期间又保存了几次，下'
            '一次只对最新的模型执行。命令最多执行一天；``timeout 1h COMMAND`` 可以更早结束它。'
        ),
    )
    exit_wait_secs: float = _option(
        600,
        'How long a process that is ending (after an exception, SIGTERM, SIGHUP or SIGXCPU) waits for a save in '
        'progress and for uploads, and how long the end of training waits for uploads and for ``on_saved``. '
        'torchrun sends SIGKILL 30 s after SIGTERM regardless; torch 2.13 can change that with ``--shutdown-timeout``.',
        _seconds,
        zh=(
            '进程将要结束时（异常、SIGTERM、SIGHUP 或 SIGXCPU 之后）等待未完成的保存和上传的时间，以及训练结束时'
            '等待上传和 ``on_saved`` 的时间，单位为秒。无论设为多少，torchrun 都会在 SIGTERM 之后 30 秒发送 SIGKI'
            'LL；torch 2.13 可以用 ``--shutdown-timeout`` 修改。'
        ),
        is_advanced=True,
    )
    upload_to: str | None = _option(
        None,
        "URL of an object store, such as 's3://bucket/run' (gs, az, oss and all else that fsspec supports), or of a "
        "storage bucket of the Hub, 'hf://buckets/OWNER/NAME/run'. Each committed save is uploaded in the background, "
        'under a prefix of its own (``hf_model_iter_500``). ``hf_model.json`` in the store names the newest save.',
        _store_url,
        zh=(
            "对象存储的 URL，例如 's3://bucket/run'（也支持 gs、az、oss 以及 fsspec 支持的其他存储），或 Hub 的存储桶"
            "，'hf://buckets/OWNER/NAME/run'。每个提交的模型都会在后台上传，使用各自的前缀（``hf_model_iter_500``）"
            '。存储中的 ``hf_model.json`` 指向最新的模型。'
        ),
    )
    upload_keep: int = _option(
        -1,
        'How many uploaded saves to keep, including the newest and besides those of ``keep_every``. -1 keeps all.',
        _at_least(1, -1),
        zh='最多保留多少个上传的模型，包括最新的，不包括 ``keep_every`` 保留的。-1 表示全部保留。',
    )
    storage_options: dict[str, Any] | None = _option(
        None,
        "Keyword arguments for the library of the store in ``upload_to``, such as ``dict(endpoint_url='https://...')``."
        ' Keep credentials where that library looks for them, not here.',
        _library_arguments,
        zh=(
            "传给对象存储的库（由 ``upload_to`` 决定）的关键字参数，例如 ``dict(endpoint_url='https://...')``。密"
            '钥请放在该库会读取的位置，不要写在这里。'
        ),
    )
    on_error: Literal['continue', 'raise'] = _option(
        'continue',
        "When a save fails: 'continue' (log the error and go on training) or 'raise'.",
        _one_of('continue', 'raise'),
        zh="保存失败时：'continue'（记录错误，继续训练）或 'raise'（抛出错误）。",
    )

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
        zh=(
            '保存间隔（epoch 数或迭代数）。-1：不按间隔保存；其他选项（例如 ``save_last`` 和 ``interval_minutes``）'
            '仍会保存。None：与训练的 CheckpointHook 及其 ``save_begin`` 相同。'
        ),
    )
    by_epoch: bool | None = _option(
        None,
        'Whether ``interval`` counts epochs or iterations. None: as the train loop does, epochs in EpochBasedTrainLoop '
        'and iterations in IterBasedTrainLoop.',
        _switch,
        zh=(
            '``interval`` 按 epoch 还是按迭代计数。None：与训练循环相同，EpochBasedTrainLoop 按 epoch，IterBa'
            'sedTrainLoop 按迭代。'
        ),
    )
    save_best: str | list[str] | None = _option(
        None,
        'As in CheckpointHook. The best model goes to ``hf_model_best``, or with several metrics to '
        '``hf_model_best_<metric>``. A model is saved there if its score beats the best so far; after a resume, also '
        'the best of the earlier run. Rank 0 compares the scores. Scores come from validation during training. If '
        'the first validation lacks the metric, that is an error.',
        _anything,
        zh=(
            '与 CheckpointHook 相同。最优权重保存到 ``hf_model_best``；有多个指标时保存到 ``hf_model_best_<metric'
            '>``。分数超过目前的最优分数时才保存；恢复训练时，目前的最优分数包括之前训练的分数。由 rank 0 比较分'
            '数。分数来自训练中的验证；如果第一次验证中没有该指标，会报错。'
        ),
    )
    rule: str | list[str] | None = _option(None, 'As in CheckpointHook.', _anything, zh='与 CheckpointHook 相同。')
    ema: bool = _option(
        True,
        'If the run has an EMAHook, save its averaged weights. Validation scores these weights, and CheckpointHook '
        'saves them. False: save the live weights.',
        _switch,
        zh=(
            '如果训练使用了 EMAHook，保存平均后的权重。验证评估的、CheckpointHook 保存的都是这些权重。False：保存'
            '未平均的权重。'
        ),
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
        zh=(
            "'steps'、'epoch'，或 'no'（不按间隔保存；其他选项，例如 ``save_last`` 和 ``interval_minutes``，仍会保存"
            '）。None：Trainer 自己保存检查点时。'
        ),
    )
    save_steps: int | None = _option(
        None,
        "With ``save_strategy='steps'``, the number of steps between saves. None: as in TrainingArguments.",
        _at_least(1),
        zh="``save_strategy='steps'`` 时的保存间隔（步数）。None：与 TrainingArguments 相同。",
    )
    save_total_limit: int | None = _option(
        1,
        'How many saves to keep, including the newest and besides those of ``keep_every``. Older ones are named '
        '``hf_model_iter_500``. None keeps all. '
        'The limit of TrainingArguments does not apply here: it is for checkpoints to resume from.',
        _must_be(
            'an integer of at least 1, or None', lambda value: value is None or (_is_number(value, int) and value >= 1)
        ),
        zh=(
            '最多保留多少个保存的模型，包括最新的，不包括 ``keep_every`` 保留的。'
            '之前的目录名为 ``hf_model_iter_500``。None 表示全部保留。Train'
            'ingArguments 中的同名选项在这里不起作用，它限制的是用于恢复训练的检查点。'
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
