"""What a command needs beyond what is always installed."""

from __future__ import annotations

#: Package to the extra that brings it.
_EXTRAS = {'mmengine': 'mmengine', 'deepspeed': 'deepspeed', 'accelerate': 'trainer', 'peft': 'peft'}
_EXTRAS |= {'matplotlib': 'plot'}


def how_to_install(error: BaseException) -> str | None:
    """What to install where an import failed for want of a package; None for other errors and other packages."""
    package = (error.name or '').partition('.')[0] if isinstance(error, ModuleNotFoundError) else ''
    if package not in _EXTRAS:
        return None
    return f"{package} is needed for this and not installed: pip install 'xhf_hooks[{_EXTRAS[package]}]'"
