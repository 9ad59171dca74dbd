"""Prints the commands' output as single lines of plain text, since names and values may come from untrusted files."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from xhf_hooks.errors import XhfError

#: Longest line. Longer ones are cut in the middle, since the end says what to do.
MOST_CHARACTERS = 1000
_AT_THE_END = 300
_MOST_TRACEBACK_LINES = 60


def one_line(text: object, limit: int = MOST_CHARACTERS) -> str:
    """The text with unprintable characters (line ends, terminal codes, bidi controls) escaped, cut to ``limit``."""
    whole = str(text)
    if len(whole) > limit:
        whole = f'{whole[: limit - _AT_THE_END]} [...] {whole[-_AT_THE_END:]}'
    if whole.isprintable():
        return whole
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in whole)


def say(line: object, to: TextIO | None = None) -> None:
    """Print a line, by default on standard output."""
    stream = sys.stdout if to is None else to
    encoding = getattr(stream, 'encoding', None) or 'utf-8'
    print(one_line(line).encode(encoding, 'backslashreplace').decode(encoding), file=stream)


def complain(line: object) -> None:
    """Print a line on standard error."""
    say(line, sys.stderr)


def print_traceback() -> None:
    """Print the current exception as a bug of this program."""
    for line in traceback.format_exc().splitlines()[-_MOST_TRACEBACK_LINES:]:
        complain(line)


@contextmanager
def libraries_print_lines() -> Iterator[None]:
    """Make log records and warnings of libraries single lines, too: they quote files without escaping."""
    make, format_warning = logging.getLogRecordFactory(), warnings.formatwarning

    def record(*args: Any, **options: Any) -> logging.LogRecord:
        made = make(*args, **options)
        try:
            made.msg, made.args = one_line(made.getMessage()), ()
        except Exception:  # the message does not fit its arguments; logging will report that
            made.msg, made.args = one_line(made.msg), ()
        if made.exc_info and made.exc_info[0] is not None:
            made.exc_text = '\n'.join(one_line(part) for part in traceback.format_exception_only(*made.exc_info[:2]))
        return made

    def formatted(message: Warning | str, *args: Any, **options: Any) -> str:
        return format_warning(one_line(message), *args, **options)

    logging.setLogRecordFactory(record)
    warnings.formatwarning = formatted
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
        warnings.formatwarning = format_warning


@contextmanager
def descriptors_silenced() -> Iterator[None]:
    """Discard what native code prints; tokenizers, for example, quotes its files."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
        for descriptor in (*kept, nowhere):
            os.close(descriptor)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error is due to lack of memory, which libraries report in many ways."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, (MemoryError, SystemError)) or getattr(found, 'errno', None) == errno.ENOMEM:
            return True
        text = str(found)[:MOST_CHARACTERS].lower()
        quotes_a_file = isinstance(found, XhfError)
        if not quotes_a_file and any(
            sign in text for sign in ('allocate memory', "can't start new thread", 'bad_alloc', 'out of memory')
        ):
            return True
        found = found.__cause__ or found.__context__
    return False
