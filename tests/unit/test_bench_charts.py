"""The charts of the benchmarks are what is drawn from the JSON beside them."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = sorted((ROOT / 'docs' / 'bench').glob('*.json'))


def words_of(drawn: Path) -> set[str]:
    """The text of an SVG, without the version of matplotlib."""
    words = {unescape(word).strip() for word in re.findall(r'>([^<>]+)<', drawn.read_text())}
    return {word for word in words if not word.startswith('Matplotlib v')}


@pytest.mark.parametrize('file', MEASURED, ids=lambda file: file.stem)
def test_the_chart_has_the_figures(file, tmp_path, monkeypatch):
    """`python tools/bench.py draw --out docs/bench` draws them again; the bytes depend on the version of matplotlib."""
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    from bench.charts import draw

    draw(file.stem, json.loads(file.read_text()), tmp_path / 'drawn.svg')
    assert words_of(tmp_path / 'drawn.svg') == words_of(file.with_suffix('.svg'))
