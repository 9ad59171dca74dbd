"""Children that are forked while a save is in flight, as DataLoader's workers are, end as if there were none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.helpers import forking_run
from tests.helpers.ranks import HANG_SECS, python_path

pytestmark = pytest.mark.modern_only


def test_children_neither_wait_for_the_save_nor_end_it(tmp_path):
    environment = os.environ | {'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': python_path()}
    command = [sys.executable, forking_run.__file__, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECS)
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        'terminated': str(-signal.SIGTERM),
        'ended': '0',
        'closed': '0',
        'forgot': '0',
        'lock_is_held': True,
        'handler_is_there': True,
        'committed_before': False,
        'saved': 3,
        'lock_is_free': True,
    }
