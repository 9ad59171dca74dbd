"""Runs a command for one save."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from xhf_hooks.config.checks import PLACEHOLDERS
from xhf_hooks.errors import XhfError
from xhf_hooks.on_saved import supervisor
from xhf_hooks.on_saved.environment import without_ranks
from xhf_hooks.on_saved.results import scalars_in

_PLACEHOLDER = re.compile('|'.join(re.escape(f'{{{name}}}') for name in PLACEHOLDERS))
#: Added to the time limit: what the supervisor needs to end a command on a busy machine.
_END_SECS = 30.0


class CommandError(XhfError):
    """A command did not succeed."""


def fill_in(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The arguments with placeholders such as ``{path}`` replaced by their values; other braces stay."""
    return [_PLACEHOLDER.sub(lambda found: str(values[found[0][1:-1]]), argument) for argument in command]


class RunningCommand:
    """A running command. Used by: the thread that runs it, and another one that may end it.

    Args:
        log: File to which its output is appended.
    """

    def __init__(self, command: Sequence[str], log: Path, timeout_secs: float) -> None:
        self._log, self._timeout_secs = log, timeout_secs
        setup = {'timeout_secs': timeout_secs, 'log': str(log), 'parent': os.getpid()}
        self._process = subprocess.Popen(
            [sys.executable, '-I', '-S', supervisor.__file__, json.dumps(setup), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=without_ranks(os.environ),
            start_new_session=True,  # Ctrl-C and other signals to the rank's process group must not reach it
        )

    def wait(self) -> dict[str, float]:
        """Wait for the end; returns the numbers of the last line, if that is a JSON object.

        Raises:
            CommandError: It could not be started, failed, exceeded its time limit, or was ended by :meth:`end`.
        """
        try:
            told, _ = self._process.communicate(timeout=self._timeout_secs + _END_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel then kills the command
            told, _ = self._process.communicate()
        try:
            result = json.loads(told)
        except ValueError:
            raise CommandError(f'its supervisor ended with status {self._process.returncode}') from None
        if result['error'] is not None:
            raise CommandError(f'it could not be started: {result["error"]}')
        if result['stopped'] is not None:
            raise CommandError(f'ended: {result["stopped"]}')
        if result['status']:
            last = f'; last line: {result["last_line"][:200]}' if result['last_line'] else ''
            raise CommandError(f'{_status(result["status"])}{last}')
        return scalars_in(result['last_line'])

    def end(self) -> None:
        """End it with all processes that it started; :meth:`wait` then raises."""
        self._process.terminate()


def _status(status: int) -> str:
    return f'exit status {status}' if status > 0 else f'killed by signal {-status}'
