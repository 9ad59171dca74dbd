"""Runs programs of this folder as users do, by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.ranks import HANG_SECS, REPO_ROOT, python_path


def run_by_torchrun(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``tests/helpers/PROGRAM.py`` on two ranks, without a GPU. Standard error is part of the output."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2']
    environment = os.environ | {'DS_ACCELERATOR': 'cpu', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': python_path()}
    return subprocess.run(
        [*command, str(REPO_ROOT / 'tests' / 'helpers' / f'{program}.py'), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECS,
    )
