"""The options that hook, callback and call have in common: parsed and checked before any training is paid for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.commit.checkpoint_folder import VERIFY_LEVELS
from xhf_hooks.errors import OptionError
from xhf_hooks.exporters.lora.exporter import LORA_MODES
from xhf_hooks.exporters.xtuner.llava import LLAVA_FORMATS
from xhf_hooks.planning.planner import parse_size
from xhf_hooks.registry import WRITERS
from xhf_hooks.save import SaveOptions

DTYPE_CODES = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16'}


@dataclass(frozen=True)
class RunOptions:
    """How a run saves; the options of the same names, parsed.

    Attributes:
        save: Its writer is one of WRITERS, or 'auto' until the file system is known.
        tokenizer: A tokenizer, a config of one, a folder, or None.
    """

    save: SaveOptions
    tokenizer: Any | None = None
    max_keep: int = 1
    async_busy: str = 'wait'
    exit_wait_secs: float = 600.0
    on_error: str = 'continue'


def parse_run(
    *,
    max_keep_ckpts: int,
    module: str | None,
    lora: str | None,
    llava_format: str | None,
    tokenizer: Any | None,
    dtype: str | None,
    max_shard_size: int | str,
    bucket_size: int | str,
    writer: str,
    async_save: bool = False,
    async_busy: str = 'wait',
    exit_wait_secs: float = 600,
    verify: str = 'sizes',
    on_error: str = 'continue',
) -> RunOptions:
    """Each option, and what goes together.

    Raises:
        OptionError: A bad value or a bad combination.
    """
    save = SaveOptions(
        module=check_module(module),
        dtype=parse_dtype(dtype),
        lora=check_choice('lora', lora, (None, *LORA_MODES)),
        llava_format=check_choice('llava_format', llava_format, (None, *LLAVA_FORMATS)),
        max_shard_nbytes=parse_nbytes('max_shard_size', max_shard_size),
        bucket_nbytes=parse_nbytes('bucket_size', bucket_size),
        writer=check_choice('writer', writer, ('auto', *WRITERS.module_dict)),
        in_background=check_switch('async_save', async_save),
        verify=check_choice('verify', verify, VERIFY_LEVELS),
    )
    check_choice('async_busy', async_busy, ('wait', 'skip'))
    if async_busy != 'wait' and not async_save:
        raise OptionError('async_busy', "'wait' when async_save is False", async_busy)
    return RunOptions(
        save,
        tokenizer=check_tokenizer(tokenizer),
        max_keep=check_max_keep(max_keep_ckpts),
        async_busy=async_busy,
        exit_wait_secs=check_seconds('exit_wait_secs', exit_wait_secs),
        on_error=check_choice('on_error', on_error, ('continue', 'raise')),
    )


def parse_dtype(value: Any) -> str | None:
    """``'bfloat16'``, ``torch.bfloat16`` or None to an element-type code or None."""
    if value is None:
        return None
    name = str(value).removeprefix('torch.')
    if name not in DTYPE_CODES:
        raise OptionError('dtype', f'None or one of {sorted(DTYPE_CODES)}', value)
    return DTYPE_CODES[name]


def parse_nbytes(option: str, value: int | str) -> int:
    """A size option in bytes."""
    try:
        return parse_size(value)
    except ValueError:
        raise OptionError(option, "a size such as '128MB' or a number of bytes", value) from None


def parse_out_dir(value: str | Path | None) -> Path | None:
    """The folder of the newest save; None is decided when the run's folder is known."""
    if value is None:
        return None
    if not isinstance(value, (str, Path)) or '://' in str(value) or not Path(value).name:
        raise OptionError('out_dir', 'the path of a folder', value)
    return Path(value).expanduser()


def check_schedule(interval: Any, by_epoch: Any, save_begin: Any, save_last: Any, save_best: Any) -> None:
    """``interval``, ``by_epoch``, ``save_begin`` and ``save_last``, each and together."""
    if interval is not None and (not _is_int(interval) or (interval < 1 and interval != -1)):
        raise OptionError('interval', 'None, -1 (never) or a number of at least 1', interval)
    if by_epoch is not None and not isinstance(by_epoch, bool):
        raise OptionError('by_epoch', 'None, True or False', by_epoch)
    if by_epoch is not None and interval is None:
        raise OptionError('by_epoch', 'None when interval is None, which follows CheckpointHook', by_epoch)
    if not _is_int(save_begin) or save_begin < 0:
        raise OptionError('save_begin', 'a number of at least 0', save_begin)
    check_switch('save_last', save_last)
    if interval == -1 and not save_last and save_best is None:
        raise OptionError('interval', 'a number, or save_last or save_best: like this nothing is ever saved', interval)


def check_max_keep(value: Any) -> int:
    """``max_keep_ckpts``."""
    if not _is_int(value) or (value < 1 and value != -1):
        raise OptionError('max_keep_ckpts', '-1 (all) or a number of at least 1', value)
    return value


def check_step(value: Any, max_keep_ckpts: Any) -> int:
    """``step`` of a single save; older saves are named by it."""
    if value is None and max_keep_ckpts == 1:
        return 0
    if not _is_int(value) or value < 0:
        raise OptionError('step', 'a number of at least 0 (None only when max_keep_ckpts is 1)', value)
    return value


def check_save_steps(value: Any, save_strategy: str | None) -> int | None:
    """``save_steps``; it goes with ``save_strategy='steps'``."""
    if value is not None and save_strategy != 'steps':
        raise OptionError('save_steps', f'None when save_strategy is {save_strategy!r}', value)
    if value is not None and (not _is_int(value) or value < 1):
        raise OptionError('save_steps', 'None or a number of at least 1', value)
    return value


def check_choice(option: str, value: Any, choices: tuple[str | None, ...]) -> str | None:
    """An option that is one of a few words."""
    if value not in choices:
        raise OptionError(option, f'one of {choices}', value)
    return value


def check_switch(option: str, value: Any) -> bool:
    """An option that is True or False."""
    if not isinstance(value, bool):
        raise OptionError(option, 'True or False', value)
    return value


def check_seconds(option: str, value: Any) -> float:
    """An option that is a time of at least 0 s."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise OptionError(option, 'seconds, at least 0', value)
    return float(value)


def check_module(value: Any) -> str | None:
    """``module``; whether the model has it is known before the first step."""
    if value is not None and (not isinstance(value, str) or not value):
        raise OptionError('module', 'None or a dotted path such as "llm"', value)
    return value


def check_tokenizer(value: Any) -> Any:
    """``tokenizer``; it is built before the first step."""
    is_folder = isinstance(value, (str, Path)) and str(value) not in ('', '.')
    known = value is None or is_folder or hasattr(value, 'save_pretrained')
    if not known and not (isinstance(value, dict) and 'type' in value):
        raise OptionError('tokenizer', 'a tokenizer, a config with a type, or a folder', value)
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
