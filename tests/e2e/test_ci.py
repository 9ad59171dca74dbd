"""What continuous integration runs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize('may_mount', [pytest.param(True, marks=pytest.mark.needs('root')), False])
@pytest.mark.parametrize(('failing', 'status'), [('', 7), ('--rest', 7), ('--xtuner', 1), (None, 0)])
def test_the_clone_lies_below_a_folder_that_nobody_else_may_enter(tmp_path, may_mount, failing, status):
    """Where it may be mounted there; what the tests print, and how they end, comes through."""
    for folder in ('.ci', 'tools', 'bin'):
        (tmp_path / folder).mkdir()
    (tmp_path / '.ci' / 'run').write_bytes((ROOT / '.ci' / 'run').read_bytes())
    said = f'pwd; stat -c %a ..; echo "$@" >&2; touch seen; [[ "${{1-}}" != "{failing}" ]] || exit 7'
    (tmp_path / 'tools' / 'test.sh').write_text(said)
    if not may_mount:
        (tmp_path / 'bin' / 'unshare').symlink_to(shutil.which('false'))
    environment = {'PATH': f'{tmp_path / "bin"}:/usr/bin:/bin', 'TMPDIR': str(tmp_path)}
    done = subprocess.run(['bash', tmp_path / '.ci' / 'run'], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, '\n' if failing == '' else '\n--rest\n')
    where, mode, *others = done.stdout.splitlines()
    of_rest = [] if failing == '' else [where, mode]
    of_xtuner = [] if status == 7 else [where, mode, '--xtuner xtuner-0.1']  # shown at the end
    assert others == of_rest + of_xtuner
    if may_mount:
        assert (where, mode) == (f'{tmp_path}/xhf_hooks-ci-{os.geteuid()}/clone', '700')
    else:
        assert where == str(tmp_path)
    assert (tmp_path / 'seen').exists(), 'what the tests leave, such as environments, is in the clone'
