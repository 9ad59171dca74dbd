"""The planner alone: what is counted is what a save would do."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
from bench import plan

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


@pytest.fixture
def measured(monkeypatch):
    """Of a layer whose matrix goes to its owner in slices, and whose vector is too small for that on 1,024 ranks."""
    shapes = [('norm', (4096,), []), ('weight', (4096, 16384), [])]
    monkeypatch.setattr(plan, 'MODELS', {'one layer': lambda: iter(shapes)})
    return {n_ranks: plan.measure(Namespace(ranks=n_ranks))['plans'][0] for n_ranks in (8, 1024)}


def test_rounds_and_buckets_are_those_of_a_save(measured):
    rounds = math.ceil(2 * 4096 * 16384 / 32e6)
    assert [(found['rounds'], found['buckets']) for found in measured.values()] == [(rounds + 1, 0), (rounds, 1)]
    assert [found['agreements'] for found in measured.values()] == [2, 4]
    assert {found['writers'] for found in measured.values()} == {1}


def test_positional_writes_are_slices(measured):
    assert [found['writes_per_rank'] for found in measured.values()] == [3, 2]
    assert measured[8]['nbytes_per_rank'] == 2 * (4096 + 4096 * 16384) / 8
