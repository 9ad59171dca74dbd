"""How a command ends that did not do what it was asked: one line, whatever the cause was."""

from __future__ import annotations

from xhf_hooks.cli.output import complain, lacks_memory, print_traceback
from xhf_hooks.errors import XhfError

#: Package to the extra that brings it.
_EXTRAS = {'mmengine': 'mmengine', 'deepspeed': 'deepspeed', 'accelerate': 'trainer', 'peft': 'peft'}
_EXTRAS |= {'matplotlib': 'plot'}


def explain(prog: str, error: BaseException, *, left: str = '', memory: str = '') -> None:
    """Print why a command ends; the traceback, too, of a fault of this program. Called where the error is handled.

    Args:
        prog: What the command was called as.
        left: What is left behind when it is interrupted, or gets no more memory.
        memory: What takes less.
    """
    if isinstance(error, KeyboardInterrupt):
        complain(f'{prog}: interrupted{left}')
    elif lacks_memory(error):
        complain(f'{prog}: this process got no more memory{left}{memory}')
    elif isinstance(error, (XhfError, OSError)):
        complain(f'{prog}: {error}')
    elif (remedy := _how_to_install(error)) is not None:
        complain(f'{prog}: {remedy}')
    else:
        print_traceback()


def _how_to_install(error: BaseException) -> str | None:
    """What to install where an import failed for want of a package; None for other errors and other packages."""
    package = (error.name or '').partition('.')[0] if isinstance(error, ModuleNotFoundError) else ''
    if package not in _EXTRAS:
        return None
    return f"{package} is needed for this and not installed: pip install 'xhf_hooks[{_EXTRAS[package]}]'"
