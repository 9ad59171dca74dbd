"""``xhf``: all commands. ``xhf-convert`` and ``xhf-verify`` are other names of ``xhf convert`` and ``xhf verify``."""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Sequence

from xhf_hooks.cli.output import CommandParser
from xhf_hooks.system.versions import __version__

#: Name of a command, and of its module beside this one, to its description.
_COMMANDS = {
    'convert': 'convert the checkpoint of a finished run into a Hugging Face folder',
    'verify': 'check that a folder is complete and unchanged, or compare two models',
    'inspect': 'show what is in a folder or checkpoint',
}
_EXAMPLES = {
    'convert work_dirs/run OUT': 'convert the last checkpoint of this run into the folder OUT',
    'verify OUT': 'check that OUT is complete, consistent and unchanged',
    'inspect work_dirs/run': 'show the models and checkpoints there: step, tensors, sizes, writer',
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument. Returns the exit status."""
    parser = CommandParser(
        prog='xhf',
        examples=_EXAMPLES,
        description='Convert training checkpoints to Hugging Face folders; check and inspect both.',
        epilog='commands:\n'
        + '\n'.join(f'  {name:<10}{meaning}' for name, meaning in _COMMANDS.items())
        + '\n\n`xhf COMMAND --help` shows the options of a command.',
    )
    parser.add_argument('--version', action='version', version=f'xhf_hooks {__version__}')
    parser.add_argument('command', metavar='COMMAND', choices=list(_COMMANDS), help=', '.join(_COMMANDS))
    parser.add_argument('arguments', metavar='...', nargs=argparse.REMAINDER, help='arguments of the command')
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given[:1] or ['--help'])
    run = pkgutil.resolve_name(f'xhf_hooks.cli.{args.command}:main')  # imported on demand
    return run(given[1:], f'xhf {args.command}')
