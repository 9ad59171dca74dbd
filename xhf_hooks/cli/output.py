"""What the commands have in common: arguments, output of one line, progress."""

from __future__ import annotations

import argparse
import errno
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from xhf_hooks.errors import XhfError
from xhf_hooks.format.text import size_text


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


#: Longest line. Longer ones are cut in the middle, since the end says what to do.
MOST_CHARACTERS = 1000
_AT_THE_END = 300
#: Package that is not required to the extra that installs it.
_EXTRAS = {'mmengine': 'mmengine', 'deepspeed': 'deepspeed', 'accelerate': 'trainer', 'peft': 'peft'}
_EXTRAS |= dict.fromkeys(('transformers', 'safetensors', 'huggingface_hub', 'tokenizers', 'tqdm'), 'convert')
#: Required packages (install_requires of setup.py). They may be missing when a script of tools/ runs uninstalled.
_REQUIRED = ('torch', 'numpy')


def one_line(text: object) -> str:
    """The text with unprintable characters (line ends, terminal codes) escaped, and shortened.

    Names of tensors and files come from anybody's files.
    """
    whole = str(text)
    if len(whole) > MOST_CHARACTERS:
        whole = f'{whole[: MOST_CHARACTERS - _AT_THE_END]} [...] {whole[-_AT_THE_END:]}'
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in whole)


def say(line: object, to: TextIO | None = None) -> None:
    """Print a line, by default on standard output."""
    stream = sys.stdout if to is None else to
    encoding = getattr(stream, 'encoding', None) or 'utf-8'
    print(one_line(line).encode(encoding, 'backslashreplace').decode(encoding), file=stream)


def complain(line: object) -> None:
    """Print a line on standard error."""
    say(line, sys.stderr)


def explain(prog: str, error: BaseException, *, left: str = '') -> None:
    """Print why a command failed; with a traceback if it is a bug. Called in the ``except`` block.

    Args:
        prog: The command's name in messages.
        left: Added for interrupts and lack of memory: what is left on disk.
    """
    package = (error.name or '').partition('.')[0] if isinstance(error, ModuleNotFoundError) else ''
    if isinstance(error, KeyboardInterrupt):
        complain(f'{prog}: interrupted{left}')
    elif lacks_memory(error):
        complain(f'{prog}: out of memory{left}. --workers 1 needs the least memory')
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


def lacks_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, is lack of memory; torch raises a RuntimeError of its allocator."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, MemoryError) or getattr(found, 'errno', None) == errno.ENOMEM:
            return True
        if isinstance(found, RuntimeError) and 'allocate memory' in str(found):
            return True
        found = found.__cause__ or found.__context__
    return False


class Progress:
    """Shows progress when called with the bytes done and the total. A context manager, which closes the bar.

    A bar on a terminal, else a line every ten seconds.

    Args:
        label: A word such as ``'converting'``.
        line_every_secs: Seconds between lines without a terminal.
    """

    def __init__(self, label: str, line_every_secs: float = 10.0) -> None:
        self._label, self._line_every_secs = label, line_every_secs
        self._bar: Any | None = None
        self._told, self._done_then = time.monotonic(), 0

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            from tqdm import tqdm

            if self._bar is None:
                self._bar = tqdm(total=total, desc=self._label, unit='B', unit_scale=True, leave=False)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._told >= self._line_every_secs:
            self._tell(done, total)

    def _tell(self, done: int, total: int) -> None:
        now = time.monotonic()
        rate = (done - self._done_then) / max(now - self._told, 1e-9)  # the recent rate
        self._told, self._done_then = now, done
        if rate > 0:
            secs = (total - done) / rate
            left = f'{secs:.0f} s left' if secs < 100 else f'{secs / 60:.0f} min left'
        else:
            left = 'waiting for the disk'
        share = f'{100 * done // max(total, 1)} % of {size_text(total)}'
        print(f'{self._label}: {share}, {size_text(int(rate))}/s, {left}', file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
