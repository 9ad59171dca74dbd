"""Runs a function in a separate process and measures it: CPU seconds, memory, whether it hangs, what it printed."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TICK = os.sysconf('SC_CLK_TCK')
_KEPT_NBYTES = 4 * 10**6  # of the output
_JUDGING_SECS = 120.0


@dataclass(frozen=True)
class Limits:
    """The limits of one run.

    Attributes:
        cpu_secs: CPU time of all threads together.
        nbytes: Memory beyond what the process had at the start.
        asleep_secs: Time without a thread that runs, is ready to run, or waits for a disk.
        file_nbytes: Size of a file that it writes.
    """

    cpu_secs: float = 30.0
    nbytes: int = 2 * 10**9
    asleep_secs: float = 10.0
    file_nbytes: int = 3 * 10**9


@dataclass(frozen=True)
class Measured:
    """The result of one run.

    Attributes:
        about: What ``prepare`` returned.
        status: What ``work`` returned; None if it did not end normally.
        ended_by: In that case the reason: a limit, a signal, an exception of ``prepare`` or ``judge``.
        verdict: What ``judge`` returned.
    """

    about: Any = None
    status: int | None = None
    ended_by: str = ''
    verdict: Any = None
    cpu_secs: float = 0.0
    extra_nbytes: int = 0


class Run:
    """One forked process. The caller must have no other thread, and polls until it is done.

    Args:
        prepare: Called first, without limits; its result is passed to ``work`` and ``judge``.
        work: The function to measure. Its output goes to ``output``.
        judge: Called last, with what ``prepare`` and ``work`` returned.
        output: Two files for standard output and standard error.
    """

    def __init__(
        self,
        prepare: Callable[[], Any],
        work: Callable[[Any], int],
        judge: Callable[[Any, int], Any],
        output: tuple[Path, Path],
        limits: Limits,
    ) -> None:
        self._limits = limits
        reading, writing = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.setpgid(0, 0)
            os.close(reading)
            _run_child(prepare, work, judge, output, limits, writing)
        os.close(writing)
        os.set_blocking(reading, False)
        self._pipe, self._received = reading, b''
        self._said: dict[str, Any] = {}
        self._seen = (-1, time.monotonic())
        self._killed_for = ''

    def poll(self) -> Measured | None:
        """Enforce the limits; returns the result once the run has ended."""
        pid, status, usage = os.wait4(self._pid, os.WNOHANG)
        self._receive()
        if not pid:
            self._enforce()
            return None
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # processes that it left running
        os.close(self._pipe)
        said = self._said
        ended_by = self._killed_for or said.get('fault', '')
        if not ended_by and os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            ended_by = 'CPU time' if number == signal.SIGXCPU else f'signal {signal.Signals(number).name}'
        elif not ended_by and 'verdict' not in said:
            ended_by = f'exit {os.waitstatus_to_exitcode(status)} in the middle'
        base = said.get('base', 0)
        done = said.get('done')
        if done is None:
            spent = usage.ru_utime + usage.ru_stime - said.get('cpu', 0.0)
            extra = usage.ru_maxrss * 1024 - base if base else 0
            return Measured(said.get('about'), None, ended_by, None, spent, extra)
        return Measured(
            said['about'], done['status'], ended_by, said.get('verdict'), done['cpu'] - said['cpu'], done['peak'] - base
        )

    def stop(self) -> None:
        """End it early."""
        self._kill('')
        os.waitpid(self._pid, 0)
        os.close(self._pipe)

    def _receive(self) -> None:
        while True:
            try:
                data = os.read(self._pipe, 65536)
            except BlockingIOError:
                break
            if not data:
                break
            self._received += data
        while len(self._received) >= 8 and len(self._received) >= 8 + (size := int(self._received[:8], 16)):
            self._said |= pickle.loads(self._received[8 : 8 + size])
            self._received = self._received[8 + size :]

    def _enforce(self) -> None:
        said, limits = self._said, self._limits
        if self._killed_for or 'base' not in said:
            return
        try:
            family = _family(self._pid)
            states = [_activity(pid) for pid in family]
            ticks, asleep = sum(ticks for ticks, _ in states), all(asleep for _, asleep in states)
            resident = max(_resident(pid) for pid in family)
        except (OSError, IndexError, ValueError):  # the process has just ended
            return
        cpu_secs, now = ticks / _TICK, time.monotonic()
        if ticks != self._seen[0] or not asleep:
            self._seen = (ticks, now)
        if 'done' in said:
            allowed, reason = said['done']['cpu'] + _JUDGING_SECS, 'CPU time of the judge'
        else:
            allowed, reason = said['cpu'] + limits.cpu_secs, 'CPU time'
        if cpu_secs > allowed:
            self._kill(reason)
        elif 'done' not in said and resident - said['base'] > limits.nbytes:
            self._kill('memory')
        elif now - self._seen[1] > limits.asleep_secs:
            self._kill('hang')

    def _kill(self, reason: str) -> None:
        self._killed_for = reason
        for kill in (os.killpg, os.kill):  # its children, too
            with suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)


def _run_child(
    prepare: Callable[[], Any],
    work: Callable[[Any], int],
    judge: Callable[[Any, int], Any],
    output: tuple[Path, Path],
    limits: Limits,
    pipe: int,
) -> None:
    """Never returns."""

    def say(**what: Any) -> None:
        data = pickle.dumps(what)
        os.write(pipe, b'%08x' % len(data) + data)

    try:
        for descriptor, path in zip((1, 2), output, strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        sys.stdout = os.fdopen(1, 'w', encoding='utf-8')  # like a command's
        sys.stderr = os.fdopen(2, 'w', buffering=1, encoding='utf-8', errors='backslashreplace')
        about = prepare()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path('/proc/self/clear_refs').write_text('5')  # VmHWM counts from here
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_nbytes, limits.file_nbytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        say(about=about, base=_field('VmRSS'), cpu=_cpu_secs())
        status = work(about)
        say(done={'status': status, 'peak': max(_field('VmHWM'), _peak_of_children()), 'cpu': _cpu_secs()})
        sys.stdout.flush()
        sys.stderr.flush()
        say(verdict=judge(about, status))
    except BaseException:  # of prepare or judge: an error in the test
        say(fault=traceback.format_exc()[-3000:])
        os._exit(97)
    os._exit(0)


def _cpu_secs() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _peak_of_children() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def _field(name: str) -> int:
    for line in Path('/proc/self/status').read_text().splitlines():
        if line.startswith(f'{name}:'):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _resident(pid: int) -> int:
    return int(Path(f'/proc/{pid}/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def _family(pid: int) -> list[int]:
    """The process and all of its descendants."""
    tasks = os.listdir(f'/proc/{pid}/task')
    children = [int(child) for t in tasks for child in Path(f'/proc/{pid}/task/{t}/children').read_text().split()]
    return [pid, *(member for child in children for member in _family(child))]


def _activity(pid: int) -> tuple[int, bool]:
    """CPU ticks of the process and its ended children, and whether all of its threads sleep."""
    fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    states = [
        Path(f'/proc/{pid}/task/{task}/stat').read_text().rpartition(')')[2].split()[0]
        for task in os.listdir(f'/proc/{pid}/task')
    ]
    return sum(map(int, fields[11:15])), all(state == 'S' for state in states)


def read_output(path: Path) -> str:
    """The kept part of the output."""
    with path.open('rb') as file:
        return file.read(_KEPT_NBYTES).decode(errors='replace')
