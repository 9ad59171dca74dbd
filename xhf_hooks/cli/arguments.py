"""A command-line parser that shows examples first, and argument types that the commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from xhf_hooks.stores.open_store import is_url


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


def folder_or_url(text: str) -> Path | str:
    """A path, or the URL of a store as it is; whoever opens it checks it."""
    return text if is_url(text) else Path(text)


def count(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'expected a number of at least 1, found {text!r}')
    return int(text)
