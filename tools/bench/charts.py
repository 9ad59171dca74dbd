"""The chart of each benchmark, made only from its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Figures, fastest, medians, size_words
from bench.ways import BY, FLOOR_GATHER, NO_SAVE, OURS

_CONVERT = 'xhf-convert'
_DASHES = 'dashed: what disk and loopback allow, as many bytes and nothing else done with them'
_SHORT = (
    ('one process writes as many bytes, the others send it theirs', 'one process writes what others send it, too'),
    ('one process writes as many bytes', 'one process writes'),
    ('all processes write as many bytes together', 'all processes write'),
    (', with fsync', ''),
    ('the same', 'one process writes'),
    ('copy what is read and written', 'copying as many bytes'),
)


_OURS_COLOR, _OTHER_COLOR, _LINE_COLOR = '#1a7f5a', '#a3acb7', '#b5482a'


@dataclass(frozen=True)
class Row:
    """One bar in each column; None draws nothing."""

    label: str
    values: tuple[float | None, ...]
    is_ours: bool = False


@dataclass(frozen=True)
class Section:
    """Rows under a title; ``lines`` are names and values drawn across the first column: the minima of all bars."""

    title: str
    rows: Sequence[Row]
    lines: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class Column:
    """What the bars of a column measure, and digits after the decimal point."""

    title: str
    digits: int = 2


@dataclass(frozen=True)
class Chart:
    """A chart. Each column has one scale for all sections."""

    title: str
    columns: Sequence[Column]
    sections: Sequence[Section]
    notes: Sequence[str] = ()


def draw(chart: Chart, path: Path) -> None:
    """Write the chart as SVG, the same bytes each time with one version of matplotlib."""
    import matplotlib.pyplot as plt

    heights = [len(section.rows) + 0.7 * len(section.lines) + 1 for section in chart.sections]
    style = {'svg.hashsalt': 'xhf_hooks', 'svg.fonttype': 'none', 'font.size': 9, 'axes.spines.right': False}
    with plt.rc_context({**style, 'axes.spines.top': False, 'axes.spines.bottom': False, 'xtick.bottom': False}):
        figure, axes = plt.subplots(
            *(len(chart.sections), len(chart.columns)), squeeze=False, sharex='col', sharey='row', layout='constrained',
            figsize=(11, 0.36 * sum(heights) + 1.2), height_ratios=heights,
        )  # fmt: skip
        figure.suptitle(chart.title, weight='bold')
        figure.supxlabel('; '.join(chart.notes), size=8)
        for section, row in zip(chart.sections, axes, strict=True):
            for number, (column, axis) in enumerate(zip(chart.columns, row, strict=True)):
                values = [found.values[number] for found in section.rows]
                colors = [_OURS_COLOR if found.is_ours else _OTHER_COLOR for found in section.rows]
                bars = axis.barh(range(len(values)), [value or 0.0 for value in values], color=colors)
                words = ['' if value is None else f'{value:,.{column.digits}f}' for value in values]
                axis.bar_label(bars, words, padding=3)
                axis.set_title(f'{section.title}\n{column.title}' if number == 0 else column.title, loc='left', size=9)
                axis.set_xticklabels([])
                axis.margins(x=0.25)
            row[0].set_yticks(range(len(section.rows)), [found.label for found in section.rows])
            for line, (name, value) in enumerate(sorted(section.lines, key=lambda line: -line[1])):
                row[0].axvline(value, color=_LINE_COLOR, linestyle='--', linewidth=1)
                place = (value, len(section.rows) - 0.3 + 0.7 * line)
                row[0].annotate(f'{name}: {value:.{chart.columns[0].digits}f}', place, color=_LINE_COLOR, size=8)
            row[0].set_ylim(len(section.rows) - 0.4 + 0.7 * len(section.lines), -0.6)
        figure.savefig(path, format='svg', metadata={'Date': None})
        plt.close(figure)


def chart_of(what: str, measured: dict[str, Any]) -> Chart:
    """The chart of ``docs/bench/WHAT.json``."""
    makers = {
        'save': _save,
        'floors': _save,
        'throttled': _throttled,
        'memory': _memory,
        'stall': _stall,
        'upload': _upload,
        'out_dir': _upload,
        'convert': _convert,
    }
    return makers[what](measured)


def _save(measured: dict[str, Any]) -> Chart:
    sections = []
    for size in measured['sizes']:
        found = fastest(medians(size['runs']))
        for is_flushed, words in ((False, 'left in the page cache'), (True, 'flushed to the disk, as the hook does')):
            some = {way: figures for way, figures in found.items() if ('with fsync' in way) == is_flushed}
            rows = [
                _row(way, is_ours=way.startswith(OURS), figures=(figures['seconds'], figures['peak_extra_mb']))
                for way, figures in sorted(some.items(), key=lambda item: item[1]['seconds'])
                if not way.startswith('floor')
            ]
            if rows:
                sections.append(Section(f'{size_words(size)}, {words}', rows, list(_floors(some))))
    columns = (Column('seconds per save'), Column('extra memory of the busiest rank, MB', 0))
    return Chart(f'Saving a ZeRO-3 model on {measured["ranks"]} ranks', columns, sections, [_DASHES, *_notes(measured)])


def _floors(found: Figures) -> Iterator[tuple[str, float]]:
    for way, figures in found.items():
        if way.startswith('floor') and way != FLOOR_GATHER:
            name = way.removeprefix('floor: ').partition(BY)[0]
            for words, short in _SHORT:
                name = name.replace(words, short)
            yield name, figures['seconds']


def _throttled(measured: dict[str, Any]) -> Chart:
    sections = []
    for case in measured['cases']:
        rows = [
            _row(way, is_ours=True, figures=(figures['seconds'],))
            for way, figures in medians(case['limited_runs']).items()
        ]
        limit = f'none of which writes more than {case["limit_nbytes_per_sec"] / 1e6:.0f} MB/s'
        sections.append(Section(f'{size_words(case)}, {case["ranks"]} ranks, {limit}', rows))
    return Chart('Saving to a share that limits each client', (Column('seconds per save'),), sections, _notes(measured))


def _memory(measured: dict[str, Any]) -> Chart:
    sections = []
    for case in measured['cases']:
        rows = []
        for way, figures in medians(case['runs']).items():
            found = (figures['peak_rank0_mb'], figures['peak_others_mb'], figures['sent_mb'])
            rows.append(_row(way.partition(', ')[0], is_ours=True, figures=found))
        sections.append(Section(f'{size_words(case)}, {case["ranks"]} ranks', rows))
    columns = (Column('extra memory of rank 0, MB', 0), Column('of the busiest other, MB', 0), Column('sent, MB', 0))
    bucket = f'bucket_size {measured["bucket_nbytes"] / 1e6:.0f} MB'
    return Chart('What a save takes of memory and network', columns, sections, [bucket, *_notes(measured)])


def _stall(measured: dict[str, Any]) -> Chart:
    sections = []
    for size in measured['sizes']:
        found = medians(size['runs'])
        rows = []
        for way, figures in found.items():
            if way != NO_SAVE:
                speed = 100 * figures.get('speed_share', 0.0)
                cached = figures['cached_mb'] * 1e8 / size['nbytes'] if 'cached_mb' in figures else None
                shown = (figures['stalled_secs'], speed, cached)
                rows.append(_row(way, is_ours=way.startswith(OURS), figures=shown))
        sections.append(Section(size_words(size), rows))
    columns = (
        Column('training stands still, s'),
        Column('speed of training meanwhile, %', 0),
        Column('of the save in the page cache, %', 0),
    )
    return Chart('What a save takes from training', columns, sections, _notes(measured))


def _upload(measured: dict[str, Any]) -> Chart:
    found = medians(measured['runs'])
    rows = [
        _row(way, is_ours=way.startswith(('upload_to', 'out_dir')), figures=(figures['seconds'], figures['sent_mb']))
        for way, figures in found.items()
    ]
    uplink = measured['uplink_nbytes_per_sec'] / 1e6
    section = Section(f'{measured["ranks"]} ranks, {uplink:.0f} MB/s each', rows)
    return Chart(
        'A save to an object store', (Column('seconds'), Column('sent by rank 0, MB', 0)), [section], _notes(measured)
    )


def _convert(measured: dict[str, Any]) -> Chart:
    sections = []
    for size in measured['sizes']:
        found = medians(size['runs'])
        rows = [
            _row(way, is_ours=way == _CONVERT, figures=(figures['seconds'], figures['peak_mb']))
            for way, figures in found.items()
            if not way.startswith('floor')
        ]
        sections.append(Section(size_words(size), rows, list(_floors(found))))
    columns = (Column('seconds per conversion'), Column('peak anonymous memory, MB', 0))
    return Chart('Converting a ZeRO-3 checkpoint', columns, sections, _notes(measured))


def _row(way: str, *, is_ours: bool, figures: tuple[float | None, ...]) -> Row:
    label, _, detail = way.partition(': ' if ': ' in way else ', ')
    return Row(f'{label}\n{detail}' if detail and 'fsync' not in detail else label, figures, is_ours)


def _notes(measured: dict[str, Any]) -> list[str]:
    machine = measured['machine']
    medians_of = f'medians of {measured["repeats"]} runs in random order; ' if 'repeats' in measured else ''
    return [f'{medians_of}{machine["cpu"]}, {machine["cores"]} cores']
