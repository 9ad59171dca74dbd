"""Children that are forked while a save is in flight, as DataLoader's workers are, end as if there were none."""

from __future__ import annotations

import json
import signal

from tests.helpers import forking_run
from tests.helpers.ranks import run_program


def test_children_neither_wait_for_the_save_nor_end_it(tmp_path):
    (ended,) = run_program(forking_run.__file__, tmp_path)
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
