"""The tests of this folder are for the environment that has xtuner; elsewhere they do not exist."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec('xtuner') else ['test_*.py']
