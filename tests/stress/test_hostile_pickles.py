"""The hostile pickles of tests/unit/sources/test_unpickler.py do what they are for, so that its tests can fail."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.hostile_pickles import HOSTILE, TRACE

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


def test_the_hostile_ones_are_hostile():
    """Some of them, in a process of their own, under pickle itself."""
    for name in (
        'os.system',
        'posix.system',
        'INST',
        'OBJ',
        'STACK_GLOBAL',
        'protocol 0',
        'protocol 4',
        'open for writing',
    ):
        subprocess.run(
            [sys.executable, '-c', 'import pickle, sys; pickle.load(sys.stdin.buffer)'], input=HOSTILE[name][0]
        )
        assert os.path.exists(TRACE), name
        os.remove(TRACE)
