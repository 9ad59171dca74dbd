"""Other versions of transformers beside the modern environment: packages in a folder that comes first on PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def overlay_path(version: str = '4.57.6') -> Path:
    """The folder of packages with this version of transformers, made by ``tools/env.sh``.

    Raises:
        FileNotFoundError: It is missing; a test that needs it must not pass without.
    """
    path = ROOT / f'.overlay-transformers-{version}'
    if not (path / 'transformers').is_dir():
        raise FileNotFoundError(f'{path}: no transformers there; bash tools/test.sh makes it')
    return path


def run_with_overlay(overlay: Path, program: Path | str, *arguments: str) -> str:
    """Run a Python program with the packages of the overlay; returns what it printed.

    Raises:
        AssertionError: It failed.
    """
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(overlay), str(ROOT)]), 'HF_HUB_OFFLINE': '1'}
    ran = subprocess.run(
        [sys.executable, str(program), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout
