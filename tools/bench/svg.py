"""Bars with lines across them, as a reproducible SVG that follows the reader's light or dark theme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

_WIDTH = 960
_LABELS = 292
_GAP, _VALUE = 24, 62  # between columns; after a bar, for its figure
_ROW, _BAR, _LINE_ROW, _HEAD, _SECTION = 38, 20, 19, 34, 34
_FONT = "-apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
_STYLE = f"""
svg {{ font-family: {_FONT}; font-size: 13px; }}
.page {{ fill: #ffffff; }} text {{ fill: #1f2328; }}
.halo {{ fill: #ffffff; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round; }}
 .small {{ font-size: 11.5px; fill: #59636e; }}
.title {{ font-size: 16px; font-weight: 600; }} .head {{ font-weight: 600; }} .section {{ font-weight: 600; }}
.other {{ fill: #a3acb7; }} .ours {{ fill: #1a7f5a; }} .axis {{ stroke: #d1d9e0; }}
.floor {{ stroke: #b5482a; stroke-width: 1.5; stroke-dasharray: 4 3; }}
.floor-name {{ fill: #a33f22; font-size: 11.5px; }}
@media (prefers-color-scheme: dark) {{
.page {{ fill: #0d1117; }} text {{ fill: #e6edf3; }} .halo {{ fill: #0d1117; stroke: #0d1117; }}
 .small {{ fill: #9198a1; }}
.other {{ fill: #59636e; }} .ours {{ fill: #2fb380; }} .axis {{ stroke: #3d444d; }}
.floor {{ stroke: #f0885c; }} .floor-name {{ fill: #f0a07c; }}
}}"""


@dataclass(frozen=True)
class Row:
    """One bar in each column.

    Attributes:
        values: One for each column; None draws nothing.
        is_ours: Whether the row is highlighted.
    """

    label: str
    values: tuple[float | None, ...]
    detail: str = ''
    is_ours: bool = False


@dataclass(frozen=True)
class Section:
    """Rows under a title.

    Attributes:
        lines: Names and values drawn across the rows of the first column: the minima of all bars.
    """

    title: str
    rows: Sequence[Row]
    lines: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class Column:
    """What the bars of a column measure.

    Attributes:
        digits: Digits after the decimal point.
    """

    title: str
    digits: int = 2


@dataclass(frozen=True)
class Chart:
    """A chart. Each column has one scale for all sections."""

    title: str
    columns: Sequence[Column]
    sections: Sequence[Section]
    notes: Sequence[str] = field(default=())


def svg(chart: Chart) -> str:
    """The file's text."""
    body: list[str] = []
    y = 30.0
    body.append(_text(16, y, chart.title, 'title'))
    y += 16
    for section in chart.sections:
        y += _SECTION
        body.append(_text(16, y, section.title, 'section'))
        y += _HEAD - 8
        for number, column in enumerate(chart.columns):
            body.append(_text(_left(chart, number), y, column.title, 'small'))
        y += 6
        body += _section(chart, section, y)
        y += _LINE_ROW * len(section.lines) + _ROW * len(section.rows)
    for note in chart.notes:
        y += 20
        body.append(_text(16, y + 4, note, 'small'))
    height = round(y + 24)
    return '\n'.join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" role="img" aria-label="{escape(chart.title)}">',
            f'<title>{escape(chart.title)}</title>',
            f'<style>{_STYLE}\n</style>',
            f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
            *body,
            '</svg>\n',
        ]
    )


def _section(chart: Chart, section: Section, y: float) -> Iterator[str]:
    top, lines = y + _LINE_ROW * len(section.lines), sorted(section.lines, key=lambda line: line[1])
    bottom = top + _ROW * len(section.rows)
    for number in range(len(chart.columns)):
        left = _left(chart, number)
        yield f'<line class="axis" x1="{left:.1f}" y1="{top:.1f}" x2="{left:.1f}" y2="{bottom:.1f}"/>'
    places = [(row, top + _ROW * i) for i, row in enumerate(section.rows)]
    for row, at in places:
        yield from _bars(chart, row, at)
    # The smallest on top: its name goes to the right, where the other lines have not begun
    for i, (name, value) in enumerate(lines):
        x, at = _left(chart, 0) + value * _scale(chart, 0), y + _LINE_ROW * i
        yield f'<line class="floor" x1="{x:.1f}" y1="{at + 3:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
        yield _text(x + 5, at + 13, f'{name}: {value:.{chart.columns[0].digits}f}', 'floor-name')
    for row, at in places:  # last, so that no line crosses a figure
        yield from _words(chart, row, at)


def _bars(chart: Chart, row: Row, top: float) -> Iterator[str]:
    for number, value in enumerate(row.values):
        if value is not None:
            kind, width = 'ours' if row.is_ours else 'other', _bar_width(chart, number, value)
            yield (
                f'<rect class="{kind}" x="{_left(chart, number):.1f}" y="{top + (_ROW - _BAR) / 2:.1f}" '
                f'width="{width:.1f}" height="{_BAR}" rx="2"/>'
            )


def _words(chart: Chart, row: Row, top: float) -> Iterator[str]:
    """The name, and the figure after each bar."""
    emphasis = 'head' if row.is_ours else ''
    yield _text(16, top + (15 if row.detail else 23), row.label, emphasis)
    if row.detail:
        yield _text(16, top + 30, row.detail, 'small')
    for number, (column, value) in enumerate(zip(chart.columns, row.values, strict=True)):
        if value is not None:
            x = _left(chart, number) + _bar_width(chart, number, value) + 5
            for kind in ('halo', emphasis):  # with a halo in the page's color, in case a line passes
                yield _text(x, top + _ROW / 2 + 4.5, f'{value:,.{column.digits}f}', kind)


def _bar_width(chart: Chart, number: int, value: float) -> float:
    return max(value * _scale(chart, number), 1.0)


def _left(chart: Chart, number: int) -> float:
    return _LABELS + number * (_column_width(chart) + _GAP)


def _column_width(chart: Chart) -> float:
    n_columns = len(chart.columns)
    return (_WIDTH - 16 - _LABELS - _GAP * (n_columns - 1)) / n_columns


def _scale(chart: Chart, number: int) -> float:
    values = [row.values[number] or 0.0 for section in chart.sections for row in section.rows]
    if number == 0:
        values += [value for section in chart.sections for _, value in section.lines]
    return (_column_width(chart) - _VALUE) / (max(values, default=0.0) or 1.0)


def _text(x: float, y: float, words: str, kind: str) -> str:
    attribute = f' class="{kind}"' if kind else ''
    return f'<text x="{x:.1f}" y="{y:.1f}"{attribute}>{escape(words)}</text>'
