"""Children of multiprocessing outlive a signal to their process group, not one from their parent, nor their parent."""

import contextlib
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver, popen_forkserver, popen_spawn_posix, util
from pathlib import Path

import pytest

from xhf_hooks.system.child_processes import SignalProofChildren

#: Longer than anything takes here.
HANG_SECS = 120.0
METHODS = ('fork', 'spawn', 'forkserver')
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def no_other_runs(monkeypatch):
    """As in a process of its own: runs of other tests may be open, or garbage that keeps its handlers."""
    monkeypatch.delitem(multiprocessing.current_process()._config, 'xhf_hooks', raising=False)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def server(monkeypatch):
    """A fork server of this test, which imports nothing; that of ranks would import for 10 s."""
    forkserver._forkserver._stop()
    monkeypatch.setattr(forkserver._forkserver, '_preload_modules', [])
    yield
    forkserver._forkserver._stop()


def test_multiprocessing_has_the_names_that_it_does_not_promise():
    """The one test that says which name has gone; the others would show how children die."""
    assert list(inspect.signature(util.register_after_fork).parameters) == ['obj', 'func']
    assert isinstance(multiprocessing.current_process()._config, dict)
    assert popen_spawn_posix.Popen and popen_forkserver.Popen
    assert list(inspect.signature(util.spawnv_passfds).parameters) == ['path', 'args', 'passfds']
    assert hasattr(forkserver._forkserver, '_forkserver_pid')
    assert list(inspect.signature(subprocess.Popen._execute_child).parameters)[:4] == [
        *('self', 'args', 'executable', 'preexec_fn')
    ]


def wait_for(path: Path) -> int:
    deadline = time.monotonic() + HANG_SECS
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return int(path.read_text())


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z'
    return False


def wait_until_taken(pid: int) -> None:
    """Until no signal to a process is pending: of two that are, it would see the sender of the first alone."""
    deadline = time.monotonic() + HANG_SECS
    while 'ShdPnd:\t0000000000000000' not in Path(f'/proc/{pid}/status').read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def work(folder: Path) -> None:
    """A child: says that it is there, waits for a file, and says that it went on."""
    (folder / 'began.tmp').write_text(str(os.getpid()))
    (folder / 'began.tmp').rename(folder / 'began')
    while not (folder / 'go').exists():
        time.sleep(0.02)
    (folder / 'done').write_text('1')
    time.sleep(HANG_SECS)


def parent(method: str, folder: Path) -> None:
    """A process that handles the signals, as training does, and ends its child; prints its exit code."""
    children = SignalProofChildren.start(SIGNALS)
    got = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: got.append(number))
    child = multiprocessing.get_context(method).Process(target=work, args=(folder,), daemon=True)
    child.start()
    wait_for(folder / 'done')
    assert set(got) == set(SIGNALS), got
    wait_until_taken(child.pid)
    child.terminate()
    child.join(HANG_SECS)
    print('exit code', child.exitcode, flush=True)
    children.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as the run that ends restores it
    later = multiprocessing.get_context(method).Process(target=time.sleep, args=(HANG_SECS,), daemon=True)
    later.start()
    if method != 'fork':
        time.sleep(1.0)  # else it may be told to end before it has begun
    later.terminate()
    later.join(HANG_SECS)
    print('a later child', later.exitcode, flush=True)


def start_and_end_programs(folder: Path) -> None:
    """A child that starts a program in two ways, ends it, and says by which signal it has ended."""
    program = subprocess.Popen(['sleep', str(HANG_SECS)])
    forked = os.fork()
    if not forked:
        time.sleep(HANG_SECS)
    time.sleep(0.2)
    program.terminate()
    os.kill(forked, signal.SIGTERM)
    told = [program.wait(), os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])]
    (folder / 'told.tmp').write_text(' '.join(map(str, told)))
    (folder / 'told.tmp').rename(folder / 'told')


@pytest.mark.parametrize('method', METHODS)
def test_what_a_child_starts_ends_as_without_us(method, tmp_path):
    """A program of a data loader worker, such as a decoder, is ended by ``Popen.terminate()``."""
    children = SignalProofChildren.start(SIGNALS)
    child = multiprocessing.get_context(method).Process(target=start_and_end_programs, args=(tmp_path,))
    child.start()
    child.join(HANG_SECS)
    children.close()
    assert (tmp_path / 'told').read_text() == f'{-signal.SIGTERM} {-signal.SIGTERM}'


@pytest.mark.parametrize('method', METHODS)
def test_a_child_ends_at_once_while_its_parent_does_not_handle_the_signal(method, tmp_path):
    """As a hook is built whose runner only tests: nobody would make a save, nor end the child."""
    children = SignalProofChildren.start([signal.SIGUSR2, signal.SIGTERM])
    child = multiprocessing.get_context(method).Process(target=work, args=(tmp_path,), daemon=True)
    child.start()
    wait_for(tmp_path / 'began')
    subprocess.run(['kill', '-TERM', str(child.pid)], check=True)
    child.join(HANG_SECS)
    children.close()
    assert child.exitcode == -signal.SIGTERM


def run_parent(method: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, method, folder], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize('method', METHODS)
def test_a_child_outlives_a_signal_to_the_group_and_not_one_from_its_parent(method, tmp_path):
    process = run_parent(method, tmp_path)
    wait_for(tmp_path / 'began')
    for number in SIGNALS:
        os.killpg(process.pid, number)
    (tmp_path / 'go').touch()
    wait_for(tmp_path / 'done')  # by the child, after the signals
    said = process.communicate(timeout=HANG_SECS)[0]
    assert said.splitlines() == [f'exit code {-signal.SIGTERM}', f'a later child {-signal.SIGTERM}']


@pytest.mark.parametrize('method', METHODS)
def test_a_child_that_got_a_signal_does_not_outlive_its_parent(method, tmp_path):
    process = run_parent(method, tmp_path)
    child = wait_for(tmp_path / 'began')
    os.killpg(process.pid, signal.SIGTERM)
    process.kill()
    process.communicate(timeout=HANG_SECS)
    deadline = time.monotonic() + HANG_SECS
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_last_of_several_runs_restores_multiprocessing():
    before = util.spawnv_passfds
    told: list[str] = []
    one, two = SignalProofChildren.start(SIGNALS), SignalProofChildren.start(SIGNALS[:1], told.append)
    assert util.spawnv_passfds != before
    one.close()
    assert util.spawnv_passfds != before and told == []
    two.close()
    assert util.spawnv_passfds == before


if __name__ == '__main__':
    parent(sys.argv[1], Path(sys.argv[2]))
