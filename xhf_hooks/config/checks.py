"""Checks of option values. Each returns the canonical value or raises OptionError."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from xhf_hooks.errors import OptionError

DTYPE_CODES = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16'}
#: Names that a command of ``on_saved`` may contain in braces.
PLACEHOLDERS = ('path', 'step', 'label', 'output')
#: Signals that can request a save. The first two do nothing else; the others also end the process.
SIGNALS = ('SIGUSR1', 'SIGUSR2', 'SIGTERM', 'SIGINT', 'SIGHUP', 'SIGXCPU')
WRITERS = ('auto', 'positional', 'parallel', 'stream', 'gather')

_SIZE_UNITS = {'': 1, 'B': 1}
for _power, _letter in enumerate('KMGT', start=1):
    _SIZE_UNITS[f'{_letter}B'] = 10 ** (3 * _power)
    _SIZE_UNITS[f'{_letter}IB'] = 2 ** (10 * _power)

#: Called with the name of the option and the given value.
Check = Callable[[str, Any], Any]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def one_of(*choices: str | None) -> Check:
    """One of the given words."""

    def check(option: str, value: Any) -> Any:
        if value not in choices:
            raise OptionError(option, f'one of {choices}', value)
        return value

    return check


def at_least(least: int, *others: int | None) -> Check:
    """An integer, or one of ``others``."""
    words = ', '.join([*map(str, others), 'or ' * bool(others) + f'an integer of at least {least}'])

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


def optional_switch(option: str, value: Any) -> bool | None:
    """True, False or None."""
    return None if value is None else switch(option, value)


def size(option: str, value: Any) -> int:
    """A size in bytes, or text such as ``'5GB'``; returns bytes."""
    try:
        return parse_size(value)
    except ValueError:
        raise OptionError(option, "a size such as '128MB' or a number of bytes", value) from None


def seconds(option: str, value: Any) -> float:
    """A non-negative number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise OptionError(option, 'a number of seconds, at least 0', value)
    return float(value)


def signal_names(option: str, value: Any) -> tuple[str, ...]:
    """None, a name such as ``'SIGUSR1'``, or a list of names; returns a tuple."""
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name in SIGNALS for name in names):
        raise OptionError(option, f'None, or one or more of {SIGNALS}', value)
    return tuple(dict.fromkeys(names))


def command(option: str, value: Any) -> tuple[str, ...] | None:
    """None or a command; returns its arguments."""
    if value is None:
        return None
    try:
        arguments = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise OptionError(option, f'a command with closed quotes ({error})', value) from None
    is_command = isinstance(arguments, (list, tuple)) and all(isinstance(argument, str) for argument in arguments)
    if not is_command or not arguments or not arguments[0]:
        raise OptionError(option, 'None or a command (a string or a list of strings)', value)
    for name in re.findall(r'(?<!\$){(\w+)}', ' '.join(arguments)):
        if name not in PLACEHOLDERS and (near := difflib.get_close_matches(name, PLACEHOLDERS, n=1)):
            raise OptionError(option, f'{{{near[0]}}} in place of {{{name}}}', value)
    return tuple(arguments)


def dtype_code(option: str, value: Any) -> str | None:
    """``'bfloat16'``, ``torch.bfloat16`` or None; returns the safetensors dtype or None."""
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


def folder_or_url(option: str, value: Any) -> Path | str | None:
    """The path of a folder, the URL of an object store, or None."""
    from xhf_hooks.places.objects import checked_url, is_url

    if not is_url(value):
        return folder(option, value)
    if value.lower().startswith('hf://'):  # the Hub would make a commit of each file
        raise OptionError(option, 'a folder or the URL of an object store (for the Hub, use upload_to)', value)
    return checked_url(option, value)


def store_url(option: str, value: Any) -> str | None:
    """The URL of a store, or None."""
    from xhf_hooks.places.objects import checked_url

    return None if value is None else checked_url(option, value)


def library_arguments(option: str, value: Any) -> dict[str, Any] | None:
    """Keyword arguments for a library, or None; returns plain dicts."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise OptionError(option, 'a dict of keyword arguments', value)
    if not all(isinstance(name, str) for name in value) or {'backend', 'path_mapping'} & {*value}:
        # The message has the names only: a value may be a secret
        raise OptionError(option, "keyword arguments of the store's library; the URL names the store", [*value])
    return {
        name: library_arguments(option, each) if isinstance(each, Mapping) else each for name, each in value.items()
    }


def dotted_path(option: str, value: Any) -> str | None:
    """The dotted path of a submodule; the exporter checks that the model has it."""
    if value is not None and (not isinstance(value, str) or not value):
        raise OptionError(option, 'None or a dotted path such as "llm"', value)
    return value


def tokenizer_like(option: str, value: Any) -> Any:
    """A tokenizer, or what it can be built from before the first step."""
    is_folder = isinstance(value, (str, Path)) and str(value) not in ('', '.')
    known = value is None or is_folder or hasattr(value, 'save_pretrained')
    if not known and not (isinstance(value, dict) and 'type' in value):
        raise OptionError(option, 'a tokenizer, a config with the key type, or a folder', value)
    return value


def anything(option: str, value: Any) -> Any:
    """Any value; it is checked where it is used."""
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
