"""``xhf``: all commands under one name. ``xhf-convert`` and ``xhf-verify`` are two of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from xhf_hooks.cli.arguments import CommandParser
from xhf_hooks.version import __version__


def _convert(arguments: list[str], prog: str) -> int:
    from xhf_hooks.cli import convert

    return convert.main(arguments, prog)


def _verify(arguments: list[str], prog: str) -> int:
    from xhf_hooks.cli import verify

    return verify.main(arguments, prog)


def _inspect(arguments: list[str], prog: str) -> int:
    from xhf_hooks.cli import inspect

    return inspect.main(arguments, prog)


def _add_hook(arguments: list[str], prog: str) -> int:
    from xhf_hooks.cli import add_hook

    return add_hook.main(arguments, prog)


#: Name to what runs it, which imports nothing before, and what it does.
_COMMANDS: dict[str, tuple[Callable[[list[str], str], int], str]] = {
    'convert': (_convert, 'the checkpoint of a finished run becomes a Hugging Face folder'),
    'verify': (_verify, 'is a folder whole and unchanged? are two places the same model?'),
    'inspect': (_inspect, 'what is in this folder or checkpoint?'),
    'add-hook': (_add_hook, 'a config of MMEngine or XTuner gets HFCheckpointHook'),
}
_EXAMPLES = {
    'convert work_dirs/run OUT': "the run's last checkpoint becomes the folder OUT",
    'verify OUT': 'is OUT whole, consistent and unchanged?',
    'inspect work_dirs/run': 'which model, step, tensors and sizes are there, and who wrote them?',
    'add-hook config.py': 'the next run is saved as Hugging Face folders while it trains',
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names.

    Returns:
        Its exit status.
    """
    parser = CommandParser(
        prog='xhf',
        examples=_EXAMPLES,
        description='Hugging Face folders out of training checkpoints.',
        epilog='commands:\n'
        + '\n'.join(f'  {name:<10}{meaning}' for name, (_, meaning) in _COMMANDS.items())
        + '\n\n`xhf COMMAND --help` has the options of each.',
    )
    parser.add_argument('--version', action='version', version=f'xhf_hooks {__version__}')
    parser.add_argument('command', metavar='COMMAND', choices=list(_COMMANDS), help=', '.join(_COMMANDS))
    parser.add_argument('arguments', metavar='...', nargs=argparse.REMAINDER, help="the command's own")
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given[:1] or ['--help'])
    run, _ = _COMMANDS[args.command]
    return run(given[1:], f'xhf {args.command}')
