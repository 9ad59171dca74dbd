"""No file takes more than 30 seconds of the processor, or 2 GB beyond its own size: each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.hostile_configs import hungry_texts
from tests.helpers.measured import Measured, measured
from xhf_hooks.meta_model.parse_config import parse_config

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

GB = 10**9


def assert_bounded(found: Measured, refused_by: type[Exception] | None = None) -> None:
    print(found)
    assert found.raised in (None, 'CheckpointError', 'ConfigError'), found
    assert refused_by is None or found.raised == refused_by.__name__, found
    assert found.cpu_secs < 30 and found.nbytes < 2 * GB, found
    assert '\n' not in str(found.result) and len(str(found.result)) < 700


def kind(function: Callable[[Any], Any]) -> Callable[[Any], str]:
    """The type of the result alone, which need not travel through a pipe."""
    return lambda argument: type(function(argument)).__name__


@pytest.mark.parametrize('name', hungry_texts())
def test_config_texts(name):
    assert_bounded(measured(kind(lambda text: parse_config(text, 'a.py')), hungry_texts()[name]))
