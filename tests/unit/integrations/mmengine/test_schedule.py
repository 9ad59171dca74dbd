"""Whether a run has scores to compare, and saves at all."""

from types import SimpleNamespace
from typing import Any

import pytest

from xhf_hooks.errors import OptionError
from xhf_hooks.integrations.mmengine.schedule import Schedule, check_schedule, validates


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


@pytest.mark.parametrize(
    ('interval', 'will_miss_scores', 'said'),
    [
        (-1, False, 'expected an interval, or save_last=True, or save_best'),
        (-1, True, 'or a validation for save_best'),
        (400, False, 'expected a smaller interval, or save_last=True, or save_best'),
    ],
)
def test_a_run_that_would_save_nothing(interval, will_miss_scores, said):
    schedule = Schedule(interval, by_epoch=False)
    with pytest.raises(OptionError) as told:
        check_schedule(run_of(val_loop=None), schedule, None, False, will_miss_scores=will_miss_scores)
    found = '-1' if interval == -1 else "'every 400 iterations, but training ends after 300 iterations'"
    assert f'{said}: nothing would ever be saved, found {found}' in str(told.value)
