"""The tests of this folder are for the environment that has xtuner; elsewhere they do not exist."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec('xtuner') else ['test_*.py']


@pytest.fixture(scope='session')
def runs(tmp_path_factory):
    from tests.e2e.xtuner_stack.launches import Runs

    return Runs(tmp_path_factory.mktemp('xtuner'))
