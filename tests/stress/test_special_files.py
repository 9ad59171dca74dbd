"""What is no regular file, in the place of each file that xhf-convert and xhf-verify may open, or beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.model_folder import save_model
from tests.helpers.special_files import KINDS, put
from xhf_hooks.cli.verify import DIFFERENT, SAME, main
from xhf_hooks.errors import IncompleteError
from xhf_hooks.files.regular_files import open_regular, require_regular
from xhf_hooks.integrity.against_manifest import check_folder

ROOT = Path(__file__).parents[2]
LIMIT_SECS = 60
SPECIAL = KINDS[:4]


@pytest.mark.modern_only  # it does not depend on the stack
def test_no_command_waits_for_any_file(tmp_path):
    """Every file of seven runs of the commands, by name: each ends, says so in a line, and leaves nothing."""
    command = [sys.executable, '-m', 'tests.helpers.special_files', str(tmp_path), str(LIMIT_SECS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kind for _, _, kind, *_ in cases} == {'', *KINDS} and len(cases) > 400
    wrong = []
    for scenario, place, kind, status, secs, staging, said in cases:
        if not kind:
            good = status == 0
        else:
            good = status in (0, 1, 2) and not staging and not any('Traceback' in line for line in said)
            errors = [line for line in said if line.startswith(('xhf-convert: ', 'xhf-verify: '))]
            errors = [line for line in errors if 'note: ' not in line]
            if kind in SPECIAL:  # none is passed over in silence, wanted or not
                good = good and (status or any(Path(place).name in line for line in said))
            if status and not scenario.startswith('verify'):
                good = good and len(errors) == 1
            if status and scenario.startswith('verify'):
                good = good and any(Path(place).name in line for line in said if line.startswith('problem'))
        if not good:
            wrong.append((scenario, place, kind, status, secs, staging, said[-3:]))
    assert not wrong, '\n'.join(map(str, wrong[:20])) + f'\n{len(wrong)} of {len(cases)}'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'sub').mkdir()
    for name in ('tokenizer.json', 'b.pth'):
        (tmp_path / 'sub' / name).write_text('{}')
    return tmp_path / 'sub'


@pytest.mark.parametrize('kind', KINDS)
def test_only_regular_files_are_opened(folder, kind):
    require_regular(folder)
    with open_regular(folder / 'tokenizer.json') as file:
        assert file.read() == b'{}' and os.get_blocking(file.fileno())
    put(folder / 'tokenizer.json', kind)
    with pytest.raises(OSError, match=r'tokenizer\.json'):
        open_regular(folder / 'tokenizer.json')
    with pytest.raises(OSError, match=r'tokenizer\.json'):
        require_regular(folder)


def test_names_that_may_be_folders(folder):
    put(folder / 'b.pth', 'folder')
    (folder / 'notes.json').symlink_to('/nowhere')
    require_regular(folder)
    require_regular(folder / 'none')
    put(folder / 'b.pth', 'socket')
    with pytest.raises(OSError, match='a socket, not a regular file'):
        require_regular(folder)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return save_model('llama', tmp_path_factory.mktemp('model') / 'model')


def test_verify_tells_links_out_of_the_folder(model, tmp_path, capsys):
    """As huggingface_hub's cache has them: no fault."""
    for path in model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / 'inner.txt').write_text('x')
    (tmp_path / 'link').symlink_to(tmp_path / 'inner.txt')
    assert main([str(tmp_path)]) == SAME
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith('note')]
    assert len(notes) == 1 and f'{len(list(model.iterdir()))} links lead out of the folder' in notes[0]


@pytest.mark.parametrize('name', ['notes.md', 'tokenizer.json', 'sub/notes.md', 'model.safetensors'])
@pytest.mark.parametrize('kind', SPECIAL)
def test_verify_reports_them(model, tmp_path, capsys, name, kind):
    copy = tmp_path / 'model'
    (copy / 'sub').mkdir(parents=True)
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    put(copy / name, kind)
    assert main([str(copy)]) == (DIFFERENT if name != 'model.safetensors' else 2)
    said = capsys.readouterr()
    assert 'a regular file' in said.out + said.err and name in said.out + said.err


def test_the_hook_does_not_commit_them(tmp_path):
    (tmp_path / 'a.txt').symlink_to('/dev/zero')
    manifest = {'format_version': 2, 'files': {'a.txt': {'nbytes': 0, 'crc32': '00000000'}}}
    with pytest.raises(IncompleteError, match=r'a.txt is a device, not a regular file$'):
        check_folder(tmp_path, manifest, 'full')
