"""Which numbers are taken from what a command prints."""

from __future__ import annotations

import json

import pytest

from xhf_hooks.on_saved.results import scalars_in

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


def test_numbers_are_flattened():
    line = json.dumps({'arc': {'acc,none': 0.5, 'alias': 'arc', 'n': 7}, 'ok': True, 'list': [1], 'none': None})
    assert scalars_in(line) == {'arc/acc,none': 0.5, 'arc/n': 7.0, 'ok': 1.0}


def test_what_is_not_finite_is_left_out():
    assert scalars_in('{"a": NaN, "b": Infinity, "c": 1e999, "d": 2, "e": "3", "f": 1' + '0' * 400 + '}') == {'d': 2.0}


@pytest.mark.parametrize('line', ['', 'done', '[1]', '0.5', '{', '{"a": 1} and more', '"a"', '{"a":' * 100_000])
def test_other_lines_are_no_result(line):
    assert scalars_in(line) == {}


def test_a_dump_is_no_result():
    assert scalars_in(json.dumps(dict.fromkeys(map(str, range(1001)), 1))) == {}
    assert len(scalars_in(json.dumps(dict.fromkeys(map(str, range(1000)), 1)))) == 1000
