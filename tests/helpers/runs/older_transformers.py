"""Programs of these tests, run with another transformers."""

import functools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

from tests.helpers.ranks.launch import REPO_ROOT


@functools.cache
def _server(version: str) -> subprocess.Popen[str]:
    """A process that has imported the packages of a folder that tools/env.sh makes. It ends with this one."""
    overlay = REPO_ROOT / f'.overlay-transformers-{version}'
    assert (overlay / 'transformers').is_dir(), f'{overlay}: no transformers there; bash tools/test.sh --rest makes it'
    environment = {**os.environ, 'PYTHONPATH': f'{overlay}{os.pathsep}{REPO_ROOT}', 'HF_HUB_OFFLINE': '1'}
    pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
    return subprocess.Popen([sys.executable, '-m', __name__], env=environment, **pipes)


def run_with_transformers(version: str, program: str, *arguments: Path) -> None:
    """Run a program of tests/helpers with this version, in a process of its own, forked from one with its imports."""
    command = [str(REPO_ROOT / 'tests' / 'helpers' / program), *map(str, arguments)]
    print(json.dumps(command), file=_server(version).stdin, flush=True)
    assert _server(version).stdout.readline() == '0\n', 'its traceback is in the output'


def _run_forked(command: list[str]) -> int:
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)  # the other one is for statuses
        sys.argv = command
        runpy.run_path(command[0], run_name='__main__')
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == '__main__':
    import peft  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    for line in sys.stdin:
        print(_run_forked(json.loads(line)), flush=True)
