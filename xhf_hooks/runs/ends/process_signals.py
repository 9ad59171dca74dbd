"""The one owner of signals in this process, and of its exit: what is handled, who is asked to save, when it ends."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

from xhf_hooks.system.threads import call_before_exit, wait_until

if TYPE_CHECKING:
    from xhf_hooks.runs.ends.run_end import RunEnd

#: Signals that ask a process to end, and do so where nothing handles them: of torchrun, SLURM and Kubernetes, of a
#: terminal that is closed, of a limit of CPU time. Ctrl-C raises KeyboardInterrupt instead.
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
#: Training goes on after them.
_GO_ON = (signal.SIGUSR1, signal.SIGUSR2)


class ProcessSignals:
    """Handles the signals of all runs of this process, from :meth:`add` to :meth:`remove`, and waits for them at exit.

    A signal of ``save_on_signal`` asks its runs for a save. After SIGUSR1 and SIGUSR2 training goes on, and the user's
    handler, if any, is called at once. Any other signal takes effect when all of these runs have answered
    (:meth:`answer`): it ends the process or calls the user's handler.

    A signal that no save answers takes effect after the background tasks (torchrun kills 30 s later). A handler
    may interrupt the main thread while that holds a lock which the awaited work needs, such as that of a log handler.
    So a thread waits, and then sends the signal to the main thread once more, where it takes effect. Until then
    training goes on, at most to the end of its iteration (:meth:`block_if_process_is_ending`).

    Python calls handlers in the main thread, between any two instructions, so they take no lock. A signal that is
    ignored (``nohup``) stays ignored. In a forked child, SIGUSR1 and SIGUSR2 do nothing; others take effect at once.
    """

    _owner: ClassVar[ProcessSignals | None] = None

    def __init__(self) -> None:
        self.process = os.getpid()
        self._runs: list[RunEnd] = []
        self._before: dict[signal.Signals, Any] = {}  # the handlers that ours have replaced
        self._unanswered: set[RunEnd] = set()
        self._after_saves: signal.Signals | None = None  # the signal that takes effect when they have answered
        self._after_tasks: signal.Signals | None = None  # the signal for which the thread waits
        self._has_waited = self._has_thread = False
        self._wake: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()  # handlers may put into it

    @classmethod
    def of_this_process(cls) -> ProcessSignals:
        """The owner; a forked child has its own."""
        owner = cls._owner
        if owner is None or owner.process != os.getpid():
            owner = cls._owner = cls()
            call_before_exit(owner._at_exit)
        return owner

    def add(self, run: RunEnd) -> None:
        """From now on, signals and the exit heed this run. Runs on: the thread that trains."""
        self._runs.append(run)
        if threading.current_thread() is threading.main_thread():
            ending = [number for number in _ENDING if run.has_tasks and signal.getsignal(number) != signal.SIG_IGN]
            if ending and not self._has_thread:  # now: no thread can be started while the process exits
                self._has_thread = True
                threading.Thread(target=self._wait_for_tasks, name='xhf-signals', daemon=True).start()
            for number in {*run.save_signals, *ending}:
                if signal.getsignal(number) != self._handle:
                    self._before[number] = signal.signal(number, self._handle)

    def remove(self, run: RunEnd) -> None:
        """Heed this run no more, and restore handlers that no other run needs. :meth:`answer` may follow."""
        self._runs = [other for other in self._runs if other is not run]
        needed = {number for other in self._runs for number in other.save_signals}
        needed |= {*_ENDING} if any(other.has_tasks for other in self._runs) else set()
        if threading.current_thread() is threading.main_thread():  # elsewhere Python refuses; ours then do as before
            for number, before in self._before.items():
                if number not in needed and signal.getsignal(number) == self._handle:
                    signal.signal(number, signal.SIG_DFL if before is None else before)

    def ends_after_save(self, run: RunEnd) -> bool:
        """Whether a signal to this process waits for a save of this run, and then ends the process."""
        return run in self._unanswered and self._after_saves is not None

    def answer(self, run: RunEnd) -> None:
        """The run has saved, or will not. A signal that waited for that takes effect, after the tasks of all runs."""
        self._unanswered.discard(run)
        number = self._after_saves
        if number is None or self._unanswered:
            return
        self._after_saves = None
        self._finish_tasks(number)
        if threading.current_thread() is threading.main_thread():
            self._take_effect(number)
        else:
            self._send_again(number)

    def block_if_process_is_ending(self) -> None:
        """If a signal has come, go no further until it takes effect. Runs on: the main thread, not in a handler."""
        wait_until(lambda: self._after_tasks is None or os.getpid() != self.process)

    def _handle(self, given: int, frame: FrameType | None) -> None:
        number = signal.Signals(given)
        if os.getpid() != self.process:
            if number not in _GO_ON:
                self._take_effect(number)
            return
        if self._has_waited:
            self._has_waited, self._after_tasks = False, None
            self._take_effect(number)
            return
        asked = [run for run in self._runs if number in run.save_signals]
        for run in asked:
            if run.requests is not None:
                run.requests.ask(number)
        if number in _GO_ON and asked:
            if callable(before := self._before[number]):
                before(number, frame)
        elif asked:
            self._after_saves = number
            self._unanswered |= {*asked}
        elif any(run.has_tasks for run in self._runs):
            if self._after_tasks is None:
                self._after_tasks = number
                self._wake.put(number)
        else:
            self._take_effect(number)

    def _wait_for_tasks(self) -> None:
        while True:
            number = self._wake.get()
            with contextlib.suppress(Exception):  # of any type: the signal must take effect in any case
                self._finish_tasks(number)
            self._send_again(number)

    def _send_again(self, number: signal.Signals) -> None:
        """Let a signal take effect in the main thread.

        It is sent to the process, not to that thread, where a child of multiprocessing has it blocked
        (system/child_processes.py). Elsewhere Linux gives it to the main thread, whose system call it interrupts.
        """
        self._has_waited = True
        os.kill(os.getpid(), number)

    def _finish_tasks(self, number: signal.Signals) -> None:
        """Wait for the tasks of all runs. Where the user handles the signal, training may go on after that."""
        goes_on = callable(self._before[number])
        for run in [*self._runs] if number in _ENDING else []:
            run.wait_before_exit() if goes_on else run.close(process_ends=True)

    def _take_effect(self, number: signal.Signals) -> None:
        """Do what would have been done without us."""
        before = self._before[number]
        if before == signal.SIG_IGN:
            return
        if callable(before):
            is_heeded = signal.getsignal(number) == self._handle
            signal.signal(number, before)
            before(number, sys._getframe())
            if is_heeded:  # the user's handler lets training go on
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._handle)
            return
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # in a child of multiprocessing
        os.kill(os.getpid(), number)
        os._exit(128 + number)  # process 1 of a container, for which the default action does nothing

    def _at_exit(self) -> None:
        if os.getpid() != self.process:
            return
        for run in [*self._runs]:
            if not run.thread.daemon and run.thread is not threading.current_thread():
                run.thread.join()  # it still trains; the interpreter would wait for it next
        for run in [*self._runs]:
            run.close(process_ends=True)
        self.block_if_process_is_ending()  # the exit status is that of the signal
