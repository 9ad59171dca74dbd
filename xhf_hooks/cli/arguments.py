"""A command-line parser that shows examples first, and argument types that the commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


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
