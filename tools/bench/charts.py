"""The chart of each benchmark, made only from its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.report import Figures, fastest, medians, size_words
from bench.svg import Chart, Column, Row, Section
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


def chart_of(what: str, measured: dict[str, Any]) -> Chart:
    """The chart of ``docs/bench/WHAT.json``."""
    makers = {
        'save': _save,
        'floors': _save,
        'throttled': _throttled,
        'memory': _memory,
        'stall': _stall,
        'plan': _plan,
        'ranks': _ranks,
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


def _plan(measured: dict[str, Any]) -> Chart:
    rows = [Row(p['model'], (p['seconds'], p['memory_mb']), is_ours=True) for p in measured['plans']]
    columns = (Column('seconds of planning'), Column('memory, MB', 0))
    return Chart('Planning a save', columns, [Section(f'{measured["ranks"]} ranks', rows)], _notes(measured))


def _ranks(measured: dict[str, Any]) -> Chart:
    rows = [Row(f'{run["ranks"]} ranks', (run['later']['seconds'],), is_ours=True) for run in measured['runs']]
    return Chart('save_hf of many small tensors', (Column('seconds per call'),), [Section('', rows)], _notes(measured))


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
    return Row(label, figures, '' if 'fsync' in detail else detail, is_ours)


def _notes(measured: dict[str, Any]) -> list[str]:
    machine = measured['machine']
    medians_of = f'medians of {measured["repeats"]} runs in random order; ' if 'repeats' in measured else ''
    return [f'{medians_of}{machine["cpu"]}, {machine["cores"]} cores']
