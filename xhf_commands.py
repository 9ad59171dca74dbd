"""Where xhf-convert and xhf-verify start: Ctrl-C while Python imports them ends them without a traceback."""

import signal
import sys
from importlib import import_module


def convert() -> int:
    """``xhf-convert``. Returns its exit status."""
    return _start('convert')


def verify() -> int:
    """``xhf-verify``. Returns its exit status."""
    return _start('verify')


def _start(command: str) -> int:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a script's background jobs have it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = import_module(f'xhf_hooks.cli.{command}').main
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main(sys.argv[1:])
