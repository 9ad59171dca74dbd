"""Command lines: help that begins with examples, and kinds of arguments that several commands have."""

from __future__ import annotations

import argparse
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """Shows examples before all options.

    Args:
        examples: A command line, and what it does.
        options: Of argparse.
    """

    def __init__(self, *, examples: dict[str, str], **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._examples = examples

    def format_help(self) -> str:
        """The examples, then what argparse writes."""
        lines = ['examples:']
        for command, meaning in self._examples.items():
            lines += [f'  {self.prog} {command}', f'      {meaning}']
        return '\n'.join([*lines, '', super().format_help()])


def count(text: str) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'a number of at least 1, not {text!r}')
    return int(text)
