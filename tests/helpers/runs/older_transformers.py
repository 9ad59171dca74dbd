"""Programs of these tests, run with another transformers."""

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.ranks.launch import REPO_ROOT


def run_with_transformers(version: str, program: str, *arguments: Path) -> None:
    """Run a program of tests/helpers with the packages of a folder that tools/env.sh makes."""
    overlay = REPO_ROOT / f'.overlay-transformers-{version}'
    assert (overlay / 'transformers').is_dir(), f'{overlay}: no transformers there; bash tools/test.sh --rest makes it'
    environment = {**os.environ, 'PYTHONPATH': f'{overlay}{os.pathsep}{REPO_ROOT}', 'HF_HUB_OFFLINE': '1'}
    command = [sys.executable, str(REPO_ROOT / 'tests' / 'helpers' / program), *map(str, arguments)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
