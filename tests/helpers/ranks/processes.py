"""Programs that run beside a test and end with it."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

#: Of tools/test.sh, for tests in another environment of what the newest packages make of their output.
MODERN_PYTHON = Path(__file__).resolve().parents[3] / '.venv' / 'bin' / 'python'
#: Time limit for starting a program on a busy machine.
START_SECS = 120.0


def environment() -> dict[str, str]:
    """This process's environment, with the folders of system programs added to PATH."""
    return os.environ | {'PATH': os.pathsep.join([os.environ.get('PATH', os.defpath), '/usr/sbin', '/sbin'])}


def absent(programs: Sequence[str]) -> list[str]:
    """The programs that this machine lacks."""
    return [program for program in programs if not shutil.which(program, path=environment()['PATH'])]


def run(*command: str | Path) -> None:
    """Run a program to its end.

    Raises:
        StartError: The program failed.
    """
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise StartError(f'{command[0]} ended with {done.returncode}: {done.stderr}{done.stdout}')


class StartError(AssertionError):
    """A program did not start; the message has its log."""


@contextlib.contextmanager
def started(command: Sequence[str | Path], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, or with this process, however that ends."""
    with log.open('wb') as output:
        process = subprocess.Popen(
            ['setpriv', '--pdeathsig', 'KILL', *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(),
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(done: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, what: str) -> None:
    """Call ``done`` until it returns True; an OSError counts as False.

    Raises:
        StartError: The process ended, or :data:`START_SECS` passed.
    """
    deadline = time.monotonic() + START_SECS
    while True:
        with contextlib.suppress(OSError):
            if done():
                return
        ended = process.poll() is not None
        if ended or time.monotonic() > deadline:
            why = f'ended with {process.returncode}' if ended else f'{START_SECS:.0f} s went by'
            raise StartError(f'{why} before {what}; its log:\n{log.read_text(errors="replace")[-4000:]}')
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    with contextlib.suppress(OSError):
        return Path(f'/proc/{pid}/stat').read_bytes().rpartition(b')')[2].split()[0] != b'Z'
    return False


def free_port() -> int:
    """A free port outside of the system's range for connections, since another test run may open many meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(('127.0.0.1', port))
            return port
