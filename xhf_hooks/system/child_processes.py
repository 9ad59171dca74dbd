"""Child processes of training survive a signal that is sent to the whole process group.

torchrun signals the process group of each rank, a terminal that of the job in the foreground, and SLURM all processes
of a step: data loader workers get the signal, too. If they end, training ends with an error before the save that the
signal requests. So children of multiprocessing block these signals, whatever their start method, and a thread in each
of them takes a signal and sees who sent it. From the parent (``terminate()``) it takes effect at once. From somebody
else it takes effect when the parent has ended; at once if the parent does not handle the signal, since then no save
will answer it.

Only a blocked signal tells its sender. (A process group of its own would be simpler, but some schedulers signal every
process of a job: SLURM's proctrack/linuxproc, LSF, PBS, systemd.) A program inherits what is blocked, and would not end
at ``Popen.terminate()``. So what such a child starts by :mod:`subprocess` or ``os.fork`` gets the signals back.

This needs five private things of the standard library (CPython 3.8 to 3.14), of which only the first is documented in
its source as meant for other modules:

- ``util.register_after_fork``: called in a child that multiprocessing has forked;
- ``Process._config``: inherited by all descendants, and pickled into those that are not forked from the parent;
- ``util.spawnv_passfds``: starts such children and the fork server, which then inherit blocked signals. They cannot end
  before they are able to handle a signal, and the fork server never handles one;
- ``forkserver._forkserver._forkserver_pid``: the fork server that runs, for a warning; without it there is none;
- ``subprocess.Popen._execute_child``: starts a program; its third argument is the caller's ``preexec_fn``.

tests/unit/system/test_child_processes.py names each of them, and fails when one of them goes. No other module of the
package uses private names of multiprocessing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

#: Seconds between two checks whether the parent has ended, once a signal has come.
_CHECK_SECS = 0.5
_KEY = 'xhf_hooks'


class SignalProofChildren:
    """From :meth:`start` to :meth:`close`, started children of multiprocessing survive signals to the process group."""

    def __init__(self, inherited: _Inherited) -> None:
        self._inherited = inherited

    @classmethod
    def start(
        cls, signals: Collection[signal.Signals], warn: Callable[[str], object] = lambda said: None
    ) -> SignalProofChildren:
        """From now on, children survive these signals.

        Args:
            signals: Signals that end a process where nothing handles them.
            warn: Called if multiprocessing's fork server runs already: neither it nor its children survive.
        """
        inherited, pid = _Inherited.of_this_process(), _fork_server_pid()
        if pid is not None and not inherited.has_started_server(pid):
            warn(
                f'save_on_signal: the fork server of multiprocessing runs already. '
                f'{"/".join(number.name for number in signals)} to the process group of a rank, as torchrun and '
                f'terminals send it, ends that server and its data loader workers before the save: start no such '
                f'process before the hook or callback begins'
            )
        children = cls(inherited)
        inherited.add(children, {*signals})
        return children

    def close(self) -> None:
        """Children that are started later end at a signal again. Existing children stay as they were started."""
        self._inherited.discard(self)


class _Inherited:
    """The signals that this process's children survive. Children that are not forked unpickle it by :func:`_arrive`.

    Args:
        signals: Signals that were perhaps blocked when the parent started this process.
    """

    def __init__(self, signals: Iterable[int] = ()) -> None:
        self._ever_blocked = {*signals}
        self._wanted: dict[int, set[signal.Signals]] = {}  # by id of the SignalProofChildren
        self._server_pid: int | None = None
        self._spawn: Any = None

    @classmethod
    def of_this_process(cls) -> _Inherited:
        config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        found = config.get(_KEY)
        if not isinstance(found, cls):
            found = config[_KEY] = cls()
            util.register_after_fork(found, _Inherited._after_fork)
        return found

    @property
    def signals(self) -> set[signal.Signals]:
        """The signals that children survive if they are started now."""
        return {number for signals in self._wanted.values() for number in signals}

    def add(self, owner: object, signals: set[signal.Signals]) -> None:
        if not self._wanted:
            self._spawn = util.spawnv_passfds
            util.spawnv_passfds = self._spawn_blocking
        self._wanted[id(owner)] = signals

    def discard(self, owner: object) -> None:
        is_last = self._wanted.pop(id(owner), None) is not None and not self._wanted
        if is_last and util.spawnv_passfds == self._spawn_blocking:
            util.spawnv_passfds = self._spawn

    def has_started_server(self, pid: int) -> bool:
        return bool(self._ever_blocked) and pid == self._server_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (sorted(self.signals), sorted(self._ever_blocked), os.getpid())

    def _spawn_blocking(self, path: Any, args: Any, passfds: Any) -> int:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        self._ever_blocked |= self.signals
        try:
            pid: int = self._spawn(path, args, passfds)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if any('multiprocessing.forkserver' in str(argument) for argument in args):
            self._server_pid = pid
        return pid

    def _after_fork(self) -> None:
        signals, parent = self.signals, multiprocessing.parent_process()
        if signals and parent is not None:
            for number in signals:
                # A handler of the parent: its Python code would run in the main thread, and wait for that
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            _outlive(signals, parent.pid or 0)


def _fork_server_pid() -> int | None:
    """The process id of multiprocessing's fork server; None if it does not run, or is unknown."""
    pid: int | None = getattr(getattr(forkserver, '_forkserver', None), '_forkserver_pid', None)
    return pid


def _arrive(signals: list[int], ever_blocked: list[int], parent: int) -> _Inherited:
    """Called in a child while it unpickles its work."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ever_blocked} - {*signals})  # one of the signals may be pending
    if signals:
        _outlive(signals, parent)
    return _Inherited({*ever_blocked, *signals})


def _outlive(signals: Iterable[int], parent: int) -> None:
    """Survive the signals. Runs on: the main thread of a child, before any other thread is started."""
    signals = {*signals}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _give_back_to_programs(signals)
    arguments = (signals, parent, os.getppid())  # os.getppid(): the fork server, of a child of it
    threading.Thread(target=_take_signals, args=arguments, name='xhf-signals', daemon=True).start()


def _give_back_to_programs(signals: set[int]) -> None:
    """Unblock the signals in what this process starts from now on, before a program begins there."""
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute_child(self: Any, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> Any:
        return execute(self, args, executable, partial(_begin_program, signals, preexec_fn), *more)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, signals))


def _begin_program(signals: set[int], preexec_fn: Callable[[], object] | None) -> None:
    """Called between fork and exec."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    if preexec_fn is not None:
        preexec_fn()


def _take_signals(signals: set[int], parent: int, ancestor: int) -> None:
    waiting: int | None = None
    while True:
        found = signal.sigwaitinfo(signals) if waiting is None else signal.sigtimedwait(signals, _CHECK_SECS)
        if found is not None and (found.si_pid in (parent, os.getpid()) or not _is_handled(found.si_signo, parent)):
            _let_take_effect(found.si_signo)
        elif found is not None and found.si_signo not in (signal.SIGUSR1, signal.SIGUSR2):
            waiting = found.si_signo
        elif waiting is not None and (os.getppid() != ancestor or _has_parent_ended()):
            number, waiting = waiting, None
            _let_take_effect(number)


def _is_handled(number: int, process: int) -> bool:
    """Whether a process handles a signal (proc(5)); True if it is not known, as on macOS."""
    try:
        lines = Path(f'/proc/{process}/status').read_text().splitlines()
    except OSError:
        return True
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith('SigCgt:'))
    return bool(caught >> (number - 1) & 1)


def _has_parent_ended() -> bool:
    """Whether the parent has ended, for a child of the fork server, which itself lives as long as a child does."""
    parent = multiprocessing.parent_process()  # None until the child begins its work
    return parent is not None and not parent.is_alive()


def _let_take_effect(number: int) -> None:
    if number == signal.SIGTERM and _is_data_loader_worker():
        os._exit(0)  # as torch's own handler, which tells terminate() from other signals (its DataLoader.cpp)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # in this thread, the only one that can now get it
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def _is_data_loader_worker() -> bool:
    data = sys.modules.get('torch.utils.data')
    return data is not None and data.get_worker_info() is not None
