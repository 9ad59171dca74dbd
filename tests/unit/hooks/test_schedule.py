"""Whether a run has scores to compare."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xhf_hooks.hooks.schedule import validates


def run_of(*, val_loop: object | None, **train_loop: Any) -> Any:
    """As much of a runner as is looked at; its train loop is of a kind that only a project knows."""
    checkpoint_hooks: list[object] = []  # so it is taken to count epochs
    loop = SimpleNamespace(**train_loop)
    return SimpleNamespace(val_loop=val_loop, train_loop=loop, hooks=checkpoint_hooks, max_epochs=3, max_iters=300)


@pytest.mark.parametrize(
    ('run', 'expected'),
    [
        (run_of(val_loop=None), False),
        (run_of(val_loop=object()), True),
        (run_of(val_loop=object(), val_begin=3), True),
        (run_of(val_loop=object(), val_begin=4), False),
    ],
)
def test_a_validation_that_begins_after_the_end_is_none(run, expected):
    assert validates(run) == expected
