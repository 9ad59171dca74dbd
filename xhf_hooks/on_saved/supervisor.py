"""Runs one command, and ends with it all that it started: a program of its own, that needs nothing of this package.

    python -I -S supervisor.py '{"timeout_secs": 3600, "log": "output.log", "parent": 4711}' COMMAND...

Why not the rank itself: what is to be done in a child before it runs the command (nice and the like) would run Python
in a fork of a process with many threads, which may deadlock. And the rank may be killed; this program sees that.

When the command has ended, is out of time, SIGTERM has come, or the rank has died, no process that descends from the
command is left: those that left its group are adopted by this program (PR_SET_CHILD_SUBREAPER) and killed, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import IO, Any

_NICE = 10
#: The kernel then takes the command's memory before that of training.
_OOM_SCORE = 500
_POLL_SECS = 0.2
#: Between SIGTERM and SIGKILL.
_GRACE_SECS = 5.0
#: Of the last line; longer ones are cut, and are no result.
_MOST_LINE_NBYTES = 2**20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Command:
    """The running command, its output, and why it has to end."""

    def __init__(self, command: list[str], log: IO[bytes], *, timeout_secs: float, parent: int) -> None:
        self._log, self._parent = log, parent
        self._deadline = time.monotonic() + timeout_secs
        self.stopped: str | None = None
        self.last_line = b''
        self._line = b''
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # no threads here
        )
        self._output: Any = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)

    def run(self) -> int:
        """Wait for the end, or bring it about; the exit status."""
        while self._process.poll() is None and not self._must_stop():
            self._copy_output(_POLL_SECS)
        if self._process.returncode is None and self.stopped != 'the run has ended':
            self._signal_group(signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_SECS
            while self._process.poll() is None and time.monotonic() < deadline:
                self._copy_output(_POLL_SECS)
        self._signal_group(signal.SIGKILL)
        status = self._process.wait()
        _kill_children()
        while self._copy_output(0.0):
            pass
        self._end_line(b'')
        return status

    def _must_stop(self) -> bool:
        if os.getppid() != self._parent:
            self.stopped = 'the run has ended'
        elif self.stopped is None and time.monotonic() > self._deadline:
            self.stopped = 'out of time'
        return self.stopped is not None

    def _on_sigterm(self, number: int, frame: Any) -> None:
        self.stopped = 'training has ended'

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it has ended
            os.killpg(self._process.pid, number)

    def _copy_output(self, wait_secs: float) -> bool:
        """Copy what has come to the log, and remember the last line; whether anything came."""
        if not self._selector.get_map():
            time.sleep(wait_secs)  # the command has closed its output, and runs on
            return False
        if not self._selector.select(wait_secs):
            return False
        data = self._output.read(2**16)
        if data is None:
            return False
        if not data:
            self._selector.unregister(self._output)
            return False
        with contextlib.suppress(OSError):  # a full disk
            self._log.write(data)
        *ended, rest = data.split(b'\n')
        for line in ended:
            self._end_line(line)
        self._line = (self._line + rest)[: _MOST_LINE_NBYTES + 1]
        return True

    def _end_line(self, end: bytes) -> None:
        line, self._line = (self._line + end).strip(), b''
        if line:
            self.last_line = line


def main() -> None:
    """Prints what came of it, in JSON."""
    setup, command = json.loads(sys.argv[1]), sys.argv[2:]
    _be_modest()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    result: dict[str, Any] = {'status': None, 'stopped': None, 'error': None, 'last_line': ''}
    with open(setup['log'], 'ab', buffering=0) as log:
        try:
            running = _Command(command, log, timeout_secs=setup['timeout_secs'], parent=setup['parent'])
        except OSError as error:
            result['error'] = str(error)
        else:
            result['status'] = running.run()
            result['stopped'] = running.stopped
            if len(running.last_line) <= _MOST_LINE_NBYTES:
                result['last_line'] = running.last_line.decode(errors='replace')
    with contextlib.suppress(OSError):  # the run has ended
        print(json.dumps(result), flush=True)


def _be_modest() -> None:
    """Training goes first."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with contextlib.suppress(OSError), open('/proc/self/oom_score_adj', 'w') as file:
        file.write(str(_OOM_SCORE))


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    function = getattr(ctypes.CDLL(None), 'prctl', None)  # Linux has it
    if function is not None:
        function(option, value, 0, 0, 0)


def _kill_children() -> None:
    """Kill all children until there are none: those of a killed one become ours."""
    deadline = time.monotonic() + _GRACE_SECS
    while time.monotonic() < deadline:
        for child in _children():
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _children() -> list[int]:
    found = []
    for name in os.listdir('/proc') if os.path.isdir('/proc') else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(name)
            with open(f'/proc/{pid}/stat', 'rb') as file:  # proc(5): pid (name) state ppid
                if int(file.read().rpartition(b')')[2].split()[1]) == os.getpid():
                    found.append(pid)
    return found


if __name__ == '__main__':
    main()
