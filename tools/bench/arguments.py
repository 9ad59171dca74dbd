"""Command-line options that several benchmarks share."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable


def add_billions(parser: ArgumentParser, default: float | list[float], choices: Iterable[float]) -> None:
    """Model sizes; several if the default is a list."""
    sizes = list(choices)
    parser.add_argument(
        '--billions',
        type=float,
        nargs='+' if isinstance(default, list) else None,
        default=default,
        choices=sizes,
        metavar='SIZE',
        help=f'billions of parameters of the model, from {words(sizes)} (default: {words(default)})',
    )


def add_ranks(parser: ArgumentParser, default: int | list[int], what: str = 'number of ranks') -> None:
    """Numbers of ranks; several if the default is a list."""
    parser.add_argument(
        '--ranks',
        type=int,
        nargs='+' if isinstance(default, list) else None,
        default=default,
        metavar='N',
        help=f'{what} (default: {words(default)})',
    )


def add_number(parser: ArgumentParser, option: str, default: int, what: str) -> None:
    """A number."""
    parser.add_argument(option, type=int, default=default, metavar='N', help=f'{what} (default: %(default)s)')


def words(value: float | list[float] | list[int]) -> str:
    """As typed on the command line."""
    return ' '.join(map(str, value)) if isinstance(value, list) else str(value)
