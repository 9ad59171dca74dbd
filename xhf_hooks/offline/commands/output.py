"""Shared code of the commands: arguments, output of one line, progress."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from xhf_hooks.errors import XhfError
from xhf_hooks.options import SIZE, parse_size
from xhf_hooks.system.versions import __version__


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose help has the usual calls at its head: command line to its description."""

    def __init__(self, *, examples: dict[str, str], **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._examples = examples
        self.add_argument('--version', action='version', version=f'%(prog)s {__version__}')

    def format_help(self) -> str:
        """Argparse's help, with the examples after the usage."""
        lines = [f'  {self.prog} {command}\n      {meaning}\n' for command, meaning in self._examples.items()]
        usage = self.format_usage()
        return ''.join([usage, '\nusual calls:\n', *lines, super().format_help().removeprefix(usage)])


def folder(text: str) -> Path:
    """A path, not a URL, which would name a folder such as ``s3:``."""
    if '://' in text:
        raise argparse.ArgumentTypeError(f'expected a path on this machine, found the URL {text}')
    return _with_home(text)


def _with_home(text: str) -> Path:
    """The path, with the home folder in place of ``~`` or ``~name``."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~name of a user who is not known here
        raise argparse.ArgumentTypeError(
            f'expected a path on this machine, found {text}: no such home folder'
        ) from None


def base_model(text: str) -> str:
    """A folder, as an absolute path, or a name on the Hub."""
    from xhf_hooks.system.files import absolute  # needs a module that Windows lacks, which is reported later

    if not text:
        raise argparse.ArgumentTypeError('expected a folder or a name on the Hub, found nothing')
    path = _with_home(text)
    return str(absolute(path)) if path.is_dir() or path != Path(text) else text


def count(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'expected a number of at least 1, found {text!r}')
    return int(text)


def size(text: str) -> int:
    """Bytes of a size."""
    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected {SIZE}, found {text!r}') from None


#: Options that saves and commands have: in messages, as Python has them, and as a command takes them.
_OPTION = '(carry_base|llava_format|lora|dtype|module)'
_IN_COMMANDS = {
    rf"\b{_OPTION}='(\w+)' or '(\w+)'": r'--\1 \2 or \3',
    rf"\b{_OPTION}='(\w+)'": r'--\1 \2',
    rf"\b[Ss]et {_OPTION} to '(\w+)'": r'give --\1 \2',
    rf'\b[Ss]et {_OPTION} to None': r'leave --\1 out',
    r"\b(carry_base|llava_format) '(\w+)'": r'--\1 \2',
    rf'\boption {_OPTION}: expected None(?! or)': r'option --\1: expected nothing',
    rf'\boption {_OPTION}\b': r'option --\1',
    r'--(carry|llava)_(base|format)\b': r'--\1-\2',
}


def in_words_of_command(text: str) -> str:
    """A message of this package with options as a command takes them, such as ``--lora merge`` for ``lora='merge'``."""
    for pattern, words in _IN_COMMANDS.items():
        text = re.sub(pattern, words, text)
    return text


def say(line: object, to: TextIO | None = None) -> None:
    """Print one line, by default on standard output.

    Options are named as the command takes them. Names of tensors and files come from anybody's files: line ends,
    terminal codes, and what the terminal's encoding lacks, are escaped.
    """
    stream = sys.stdout if to is None else to
    encoding = getattr(stream, 'encoding', None) or 'utf-8'
    text = ''.join(
        c if c.isprintable() else c.encode('unicode_escape').decode() for c in in_words_of_command(str(line))
    )
    print(text.encode(encoding, 'backslashreplace').decode(encoding), file=stream)


def complain(line: object) -> None:
    """Print a line on standard error."""
    say(line, sys.stderr)


def explain(prog: str, error: BaseException, *, left: str = '') -> None:
    """Print why a command failed; with a traceback if it is a bug. Called in the ``except`` block.

    Args:
        prog: The command's name in messages.
        left: Added if it was interrupted: what is left on disk.
    """
    package = (error.name or '').partition('.')[0] if isinstance(error, ModuleNotFoundError) else ''
    if isinstance(error, KeyboardInterrupt):
        complain(f'{prog}: interrupted{left}')
    elif isinstance(error, (XhfError, OSError)):
        complain(f'{prog}: {error}')
    elif package in sys.stdlib_module_names:  # such as fcntl and resource on Windows
        complain(f'{prog}: needs Linux or macOS: Python on {sys.platform} has no module {package}')
    elif package not in ('', 'xhf_hooks'):
        complain(f'{prog}: {package} is not installed: pip install {package}')
    else:
        for line in traceback.format_exc().splitlines():
            complain(line)


_LOG_SECS = 10.0  # between lines in a log


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of tqdm, as a function of the bytes done and the total. Short work shows none."""
    from tqdm import tqdm  # transformers and huggingface_hub bring it

    secs = 0.5 if sys.stderr.isatty() else _LOG_SECS
    with tqdm(desc=label, unit='B', unit_scale=True, leave=False, delay=secs, mininterval=secs) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
