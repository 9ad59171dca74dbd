"""Tables and charts are made of the JSON alone, and those that lie there are what it gives."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from html import unescape
from pathlib import Path

import pytest
from bench.charts import CHARTS, draw, sections

ROOT = Path(__file__).parents[3]
MEASURED = sorted((ROOT / 'docs' / 'bench').glob('*.json'))


@pytest.fixture(scope='module')
def command():
    """tools/bench.py, whose name the folder beside it has, too."""
    spec = importlib.util.spec_from_file_location('bench_command', ROOT / 'tools' / 'bench.py')
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def words_of(drawn: Path) -> set[str]:
    """The text of an SVG."""
    return {unescape(word).strip() for word in re.findall(r'>([^<>]+)<', drawn.read_text())}


@pytest.mark.parametrize('file', MEASURED, ids=lambda file: file.stem)
def test_the_chart_has_the_figures(file):
    """`python tools/bench.py draw --out docs/bench` draws them again; the bytes depend on the version of matplotlib."""
    drawn = words_of(file.with_suffix('.svg'))
    parts = sections(file.stem, json.loads(file.read_text()))
    for _, figures in parts:
        for found in figures.values():
            assert {words.format(found[key]) for key, _, words in CHARTS[file.stem][1] if key in found} <= drawn
    assert all(figures for _, figures in parts)


def test_one_command_measures_all_that_is_quoted(command):
    assert set(command.BENCHES) >= {file.stem for file in MEASURED}
    assert {file.stem for file in (ROOT / 'docs' / 'bench').glob('*.svg')} == {file.stem for file in MEASURED}


def test_a_chart_is_drawn(tmp_path):
    runs = {'theirs': [{'seconds': 8.0}], 'xhf_hooks stream': [{'seconds': 2.0, 'peak_extra_mb': 1.0}]}
    size = {'parameters': 10**8, 'nbytes': 2 * 10**8, 'runs': runs}
    measured = {'machine': {'cpu': '<cpu>', 'cores': 2}, 'ranks': 2, 'sizes': [size]}
    draw('save', measured, tmp_path / 'a')
    assert {'8.00', '2.00', '1', '<cpu>, 2 cores', 'theirs', 'xhf_hooks stream'} <= words_of(tmp_path / 'a')
