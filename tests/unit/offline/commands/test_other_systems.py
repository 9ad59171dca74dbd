"""The commands on systems that lack calls of Linux: they work on a Mac, and Windows is refused in one line."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.models.model_folder import save_model
from tests.helpers.models.zoo import build
from tests.helpers.ranks.launch import run_program

#: What Python on a Mac lacks.
MAC = """
import ctypes, os, sys
for name in ('sched_getaffinity', 'sched_setaffinity', 'posix_fadvise', 'posix_fallocate', 'fdatasync', 'O_DIRECT'):
    delattr(os, name)
for name in [name for name in vars(os) if name.startswith('POSIX_FADV_')]:
    delattr(os, name)
from xhf_hooks.system import linux_calls
for call in vars(linux_calls).values():
    if isinstance(call, linux_calls.LinuxCall):
        call.function = None
"""
#: What Python on Windows lacks.
WINDOWS = """
import sys, torch, transformers
for name in ('fcntl', 'resource'):
    sys.modules.pop(name, None)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ('fcntl', 'resource'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    """A base model, and a checkpoint of it."""
    folder = tmp_path_factory.mktemp('other_systems')
    save_model('llama', folder / 'base')
    torch.save(build('llama').state_dict(), folder / 'weights.pth')
    return folder


#: A forked program has imported the package.
ANEW = """
import sys
for name in [name for name in sys.modules if name.partition('.')[0] == 'xhf_hooks']:
    del sys.modules[name]
"""


def run(system: str, command: str, *args: object) -> Any:
    code = f'{ANEW}{system}\nfrom xhf_hooks.offline.commands.{command} import main\nsys.exit(main(sys.argv[1:]))'
    (done,) = run_program(code, *args)
    return done


def test_a_mac_converts_and_verifies(folder):
    """The bytes are those that Linux writes."""
    for system, out in ((MAC, 'mac'), ('import sys', 'linux')):
        options = ['--base', folder / 'base', '--verify', 'full']
        done = run(system, 'convert', folder / 'weights.pth', folder / out, *options)
        assert done.returncode == 0 and 'verified' in done.stdout, done.stderr
    for file in (folder / 'linux').iterdir():
        assert (folder / 'mac' / file.name).read_bytes() == file.read_bytes() or file.name == 'xhf_manifest.json'
    done = run(MAC, 'verify', folder / 'mac')
    assert done.returncode == 0 and ': good (' in done.stdout, done.stderr
    done = run(MAC, 'verify', '--compare', folder / 'mac', folder / 'linux')
    assert done.stdout.splitlines()[-1].startswith('identical: 21 ')


@pytest.mark.parametrize('has_base', [False, True])
@pytest.mark.parametrize('command', ['convert', 'verify'])
def test_windows_is_refused_in_one_line(folder, command, has_base):
    out = [] if command == 'verify' else [folder / 'out']
    base = ['--base', folder / 'base'] if has_base else []
    done = run(WINDOWS, command, folder / 'base', *out, *base)
    expected = f'xhf-{command}: needs Linux or macOS: Python on {sys.platform} has no module resource\n'
    assert (done.stdout, done.stderr) == ('', expected)
    assert done.returncode == {'convert': 1, 'verify': 2}[command]
