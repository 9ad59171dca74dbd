"""Reports why a command failed, in one line."""

from __future__ import annotations

from xhf_hooks.cli.output import complain, lacks_memory, print_traceback
from xhf_hooks.errors import XhfError

#: Package that is not required to the extra that installs it.
_EXTRAS = {'mmengine': 'mmengine', 'deepspeed': 'deepspeed', 'accelerate': 'trainer', 'peft': 'peft'}
_EXTRAS |= dict.fromkeys(('transformers', 'safetensors', 'huggingface_hub', 'tokenizers'), 'convert')
#: Required packages (install_requires of setup.py). They may be missing when a script of tools/ runs uninstalled.
_REQUIRED = ('torch', 'numpy')


def explain(prog: str, error: BaseException, *, left: str = '', memory: str = '') -> None:
    """Print why a command failed; with a traceback if it is a bug. Called in the ``except`` block.

    Args:
        prog: The command's name in messages.
        left: Added for interrupts and lack of memory: what is left on disk.
        memory: Added for lack of memory: how to use less.
    """
    if isinstance(error, KeyboardInterrupt):
        complain(f'{prog}: interrupted{left}')
    elif lacks_memory(error):
        complain(f'{prog}: out of memory{left}{memory}')
    elif isinstance(error, (XhfError, OSError)):
        complain(f'{prog}: {error}')
    elif (remedy := _how_to_install(error)) is not None:
        complain(f'{prog}: {remedy}')
    else:
        print_traceback()


def _how_to_install(error: BaseException) -> str | None:
    """The pip command for a missing package; None for other errors."""
    package = (error.name or '').partition('.')[0] if isinstance(error, ModuleNotFoundError) else ''
    if package in _REQUIRED:
        return f'{package} is needed for this and not installed: pip install xhf_hooks, or in a clone pip install .'
    if package not in _EXTRAS:
        return None
    return f"{package} is not installed: pip install 'xhf_hooks[{_EXTRAS[package]}]'"
