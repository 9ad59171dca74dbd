"""When to save: as MMEngine itself counts, on a grid of all that matters."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
from mmengine.hooks import Hook

from xhf_hooks.hooks.schedule import Schedule

INTERVALS = [-1, 1, 2, 3, 7]
BEGINS = [0, 1, 2, 5, 30]
COUNTS = range(25)


@pytest.mark.parametrize(('interval', 'begin'), list(product(INTERVALS, BEGINS)))
def test_iterations_as_mmengine_counts_them(interval, begin):
    schedule = Schedule(interval, by_epoch=False, save_begin=begin)
    mmengine = [Hook().every_n_train_iters(SimpleNamespace(iter=i), interval, begin) for i in COUNTS]
    assert [schedule.is_due_after_iter(i + 1) for i in COUNTS] == mmengine
    assert not any(schedule.is_due_after_epoch(i + 1) for i in COUNTS)


@pytest.mark.parametrize(('interval', 'begin'), list(product(INTERVALS, BEGINS)))
def test_epochs_as_mmengine_counts_them(interval, begin):
    schedule = Schedule(interval, by_epoch=True, save_begin=begin)
    mmengine = [Hook().every_n_epochs(SimpleNamespace(epoch=i), interval, begin) for i in COUNTS]
    assert [schedule.is_due_after_epoch(i + 1) for i in COUNTS] == mmengine
    assert not any(schedule.is_due_after_iter(i + 1) for i in COUNTS)


@pytest.mark.parametrize(('interval', 'begin'), list(product(INTERVALS, BEGINS)))
def test_the_next_that_is_due(interval, begin):
    schedule = Schedule(interval, by_epoch=False, save_begin=begin)
    due = [count for count in range(1, 80) if schedule.is_due_after_iter(count)]
    for done in COUNTS:
        assert schedule.next_due(done) == next((count for count in due if count > done), None)


def test_example():
    schedule = Schedule(3, by_epoch=False, save_begin=4)
    assert [done for done in range(1, 14) if schedule.is_due_after_iter(done)] == [4, 7, 10, 13]


@pytest.mark.parametrize(
    ('schedule', 'text'),
    [
        (Schedule(500, False, 0), 'every 500 iterations'),
        (Schedule(2, True, 4), 'every 2 epochs from 4 on'),
        (Schedule(-1, True, 4), 'never'),
    ],
)
def test_text(schedule, text):
    assert str(schedule) == text
