"""What the commands have in common: arguments, output of one line, progress."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from xhf_hooks.errors import XhfError


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose help begins with examples.

    Args:
        examples: Command line to its description.
        options: Arguments of ArgumentParser.
    """

    def __init__(self, *, examples: dict[str, str], **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._examples = examples

    def format_help(self) -> str:
        """The examples, then argparse's help."""
        lines = ['examples:']
        for command, meaning in self._examples.items():
            lines += [f'  {self.prog} {command}', f'      {meaning}']
        return '\n'.join([*lines, '', super().format_help()])


def folder(text: str) -> Path:
    """A path, not a URL, which would name a folder such as ``s3:``."""
    if '://' in text:
        raise argparse.ArgumentTypeError(f'expected a path on this machine, found the URL {text}')
    return Path(text)


def count(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'expected a number of at least 1, found {text!r}')
    return int(text)


def say(line: object, to: TextIO | None = None) -> None:
    """Print one line, by default on standard output.

    Names of tensors and files come from anybody's files: line ends, terminal codes, and what the terminal's encoding
    lacks, are escaped.
    """
    stream = sys.stdout if to is None else to
    encoding = getattr(stream, 'encoding', None) or 'utf-8'
    text = ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in str(line))
    print(text.encode(encoding, 'backslashreplace').decode(encoding), file=stream)


def complain(line: object) -> None:
    """Print a line on standard error."""
    say(line, sys.stderr)


#: Package that is not required to the extra that installs it.
_EXTRAS = {'mmengine': 'mmengine', 'deepspeed': 'deepspeed', 'accelerate': 'trainer', 'peft': 'peft'}
_EXTRAS |= dict.fromkeys(('transformers', 'safetensors', 'huggingface_hub', 'tokenizers', 'tqdm'), 'convert')
#: Required packages (install_requires of setup.py). They may be missing when a script of tools/ runs uninstalled.
_REQUIRED = ('torch', 'numpy')


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
    elif package in _REQUIRED:
        remedy = 'pip install xhf_hooks, or in a clone pip install .'
        complain(f'{prog}: {package} is needed for this and not installed: {remedy}')
    elif package in _EXTRAS:
        complain(f"{prog}: {package} is not installed: pip install 'xhf_hooks[{_EXTRAS[package]}]'")
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
