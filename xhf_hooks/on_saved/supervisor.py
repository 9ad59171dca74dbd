"""Runs a command and, when it ends, kills all processes that it started. A standalone program.

    python -I -S supervisor.py '{"timeout_secs": 3600, "log": "output.log", "parent": 4711}' COMMAND...

The rank does not start the command itself: setting its priority would run Python in a fork of a process with many
threads, which may deadlock. This program also notices when the rank is killed.

It ends when the command ends or exceeds its time limit, on SIGTERM, and when the rank dies. No descendant of the
command is left then: those that left its process group are adopted by this program (PR_SET_CHILD_SUBREAPER) and killed.
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
#: When memory runs out, the kernel kills the command before training.
_OOM_SCORE = 500
_POLL_SECS = 0.2
#: Seconds between SIGTERM and SIGKILL.
_GRACE_SECS = 5.0
#: Longest last line. A longer one is cut and is not a result.
_MOST_LINE_NBYTES = 2**20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Command:
    """The running command, its output, and the reason to end it."""

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
        """Wait until the command ends, or end it; returns the exit status."""
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
        with contextlib.suppress(OSError):  # already ended
            os.killpg(self._process.pid, number)

    def _copy_output(self, wait_secs: float) -> bool:
        """Copy new output to the log and keep the last line; returns whether there was any."""
        if not self._selector.get_map():
            time.sleep(wait_secs)  # the command has closed its output but is still running
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
    """Run the command and print the result as JSON."""
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
    """Lower the priority, so that training goes first."""
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
    """Kill children until there are none left; the children of a killed one become ours."""
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
