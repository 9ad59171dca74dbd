"""Raises the limit of open files before they are needed."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from xhf_hooks.errors import LimitError

_OPEN = Path('/proc/self/fd')
#: Reserve for other files of the process: data, logs, libraries.
_SPARE = 64


def allow_open_files(n_files: int, what: str) -> None:
    """Raise the soft limit of open files for ``n_files`` more, if necessary. Runs on: any rank.

    The usual soft limit is 1024; a process may raise it up to the hard limit, which is usually far higher.

    Raises:
        LimitError: The hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = len(os.listdir(_OPEN)) if _OPEN.exists() else 0
    needed = n_open + n_files + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LimitError(
            f'a save needs {n_files} more open files ({what}) besides the {n_open} open ones: expected a limit of '
            f'at least {needed}, found {hard}; raise it with "ulimit -Hn {needed}", or in the job script'
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
