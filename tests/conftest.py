"""What a test needs beyond the modern environment is in its marker ``needs``.

Where a machine lacks it, the test is left out, and that is said where nobody overlooks it.
"""

import functools
import gc
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.faults.moosefs import missing
from tests.helpers.ranks.processes import MODERN_PYTHON, absent

TESTS = Path(__file__).parent
LEFT_OUT = pytest.StashKey[Counter[str]]()


@functools.cache
def _may_mount() -> bool:
    return subprocess.run(['unshare', '--mount', '--net', 'true'], capture_output=True).returncode == 0


def _is_ext4_or_xfs() -> bool:
    kind = subprocess.run(['stat', '-f', '-c', '%T', tempfile.gettempdir()], capture_output=True, text=True).stdout
    return kind.strip() in ('ext2/ext3', 'xfs')


#: What a test may need beyond the modern environment, and whether this machine has it. Such tests are not in the first
#: tier, which is what a visitor runs (tools/test.sh).
NEEDS: dict[str, Callable[[], object]] = {
    'compiler': lambda: shutil.which('cc') and shutil.which('c++'),
    'ext4 or XFS': _is_ext4_or_xfs,
    'libaio-dev': Path('/usr/include/libaio.h').exists,
    'MooseFS': lambda: missing() is None,
    'root': _may_mount,
    'stores': lambda: find_spec('s3fs') and find_spec('moto'),
    'the modern environment': MODERN_PYTHON.exists,
    'transformers 4': lambda: all((TESTS.parent / f'.overlay-transformers-{v}').exists() for v in ('4.48.0', '4.57.6')),
    'xfsprogs and btrfs-progs': lambda: not absent(['mkfs.xfs', 'mkfs.btrfs']),
}


def pytest_configure() -> None:
    # Where the tests were started by `&` in a script or by nohup, these are ignored, and every child would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        '--times', type=int, default=1, help='how often tests/stress kills runs, and saves on a network file system'
    )
    parser.addoption('--complete', action='store_true', help='fail if a test is left out')


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the argument ``turn`` runs that often."""
    if 'turn' in metafunc.fixturenames:
        metafunc.parametrize('turn', range(metafunc.config.getoption('--times')), scope='module')


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Of what ``-m`` and ``-k`` choose, leave out what is for another stack, or needs what this machine lacks.

    All of tests/stress is in the second tier, since it takes long. A plain ``pytest``, which is given no path, is the
    quick tier, and runs nothing of the second.
    """
    is_quick = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    for item in items:
        if item.path.is_relative_to(TESTS / 'stress'):
            item.add_marker(pytest.mark.needs())
    yield
    config.stash[LEFT_OUT] = Counter()
    collected = []
    for item in items:
        if item.get_closest_marker('xtuner_only') and not find_spec('xtuner'):
            continue
        needs = [what for marker in item.iter_markers('needs') for what in marker.args]
        if is_quick and item.get_closest_marker('needs'):
            continue
        lacking = [what for what in needs if not _has(what)]
        config.stash[LEFT_OUT].update(lacking)
        if not lacking:
            collected.append(item)
    items[:] = collected


@functools.cache
def _has(what: str) -> bool:
    return bool(NEEDS[what]())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exempt what was imported from garbage collection, which transformers and DeepSpeed start again and again."""
    if len(sys.modules) != getattr(item.session, 'n_modules', 0):
        item.session.n_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was left out, and why."""
    left_out = config.stash.get(LEFT_OUT, {})
    if left_out:
        terminalreporter.section('NOT TESTED ON THIS MACHINE', sep='!', red=True, bold=True)
    for what, count in left_out.items():
        terminalreporter.line(f'{count} tests need {what}', red=True, bold=True)
    skipped = terminalreporter.stats.get('skipped', [])
    if skipped and config.getoption('--complete'):
        terminalreporter.line(
            f'FAILED with --complete: {len(skipped)} tests were skipped, see above', red=True, bold=True
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With ``--complete``, what was left out or skipped is a failure."""
    reporter = session.config.pluginmanager.get_plugin('terminalreporter')
    is_complete = not session.config.stash.get(LEFT_OUT, None) and not reporter.stats.get('skipped')
    if session.config.getoption('--complete') and not is_complete and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
