"""``xhf inspect``: what is in a folder or checkpoint, in a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xhf_hooks.cli.arguments import CommandParser, count
from xhf_hooks.cli.collector import without_collector
from xhf_hooks.cli.ending import explain
from xhf_hooks.cli.output import complain, libraries_print_lines, say
from xhf_hooks.format.text import size_text
from xhf_hooks.installed import require_usable

if TYPE_CHECKING:
    from xhf_hooks.verify.describe import Described

DONE, PARTLY, UNUSABLE = 0, 1, 2
_EXAMPLES = {
    'work_dirs/run': "the run's last checkpoint, and every folder that the hook saved",
    'hf_model --tensors 20': 'the folder, and its 20 largest tensors',
    'work_dirs/run/iter_500.pth --json': 'everything about a checkpoint, as JSON for other programs',
}
_MOST_CHARACTERS = 60  # of a tensor name in the table


def parse_args(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser(
        prog=prog,
        examples=_EXAMPLES,
        description='Show what is in a folder or checkpoint: model, step, tensors, dtypes, sizes, and what wrote it.\n'
        'Reads no tensors and runs no code from it. To check that a folder is complete, use xhf verify.',
        epilog='Exit status: 0 everything was read; 1 part of it is damaged or unreadable; 2 unusable input.',
    )
    parser.add_argument('path', metavar='PATH', type=Path, help='a model folder, a checkpoint, or a work_dir')
    parser.add_argument('--tensors', type=count, metavar='N', default=0, help='also list the N largest tensors')
    parser.add_argument('--json', action='store_true', help='print the result, with all tensors, as JSON')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, prog: str = 'xhf inspect') -> int:
    """Run the command, named ``prog`` in messages. Returns the exit status."""
    args = parse_args(argv, prog)
    try:
        require_usable('torch', 'transformers')
        with libraries_print_lines():
            return _run(args, prog)
    except (Exception, KeyboardInterrupt) as error:
        explain(prog, error)
        return UNUSABLE


def _run(args: argparse.Namespace, prog: str) -> int:
    with without_collector(freeze=True):
        from xhf_hooks.verify.describe import describe

        found, errors = describe(args.path)
    if args.json:
        print(json.dumps([one.as_json() for one in found], indent=2))
    else:
        for number, one in enumerate(found):
            if number:
                say('')
            _show(one, args.tensors)
    for error in errors:
        complain(f'{prog}: {error}')
    return PARTLY if errors or any(one.problems for one in found) else DONE


def _show(one: Described, n_tensors: int) -> None:
    say(one.path)
    for key, value in one.rows():
        say(f'  {key:<12}{value}')
    largest = sorted(one.tensors, key=lambda tensor: -tensor.nbytes)[:n_tensors]
    for tensor in largest:
        shape = ' x '.join(map(str, tensor.shape)) or 'scalar'
        name = f'{tensor.name[:_MOST_CHARACTERS]:<{_MOST_CHARACTERS}}'
        say(f'    {name} {tensor.dtype:<6}{shape:<20}{size_text(tensor.nbytes)}')
