"""The tables of ``tools/bench.py``, made only from its JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.ways import (
    ACCELERATE,
    ASYNC,
    BUCKET_NBYTES,
    DCP,
    FLAT,
    FLOOR,
    FLOOR_ALL,
    FSYNC,
    FSYNC_WORDS,
    HSDP,
    NO_SAVE,
    OURS,
    SYNC,
    XTUNER,
)

_CONVERT = 'xhf-convert'
Runs = dict[str, list[dict[str, float]]]
Figures = dict[str, dict[str, float]]
#: A heading, and a function that returns a way's text in that column, if any.
Column = tuple[str, Callable[[str, dict[str, float]], str | None]]


def table(what: str, measured: dict[str, Any]) -> str:
    """The tables in Markdown, one for each case."""
    if what == 'memory':
        return _memory_table(measured['cases'])
    table_of = {'stall': _stall_table, 'convert': _convert_table, 'upload': _upload_table}.get(what, _save_table)
    return '\n'.join(table_of(case) for case in measured['cases'])


def medians(runs: Runs) -> Figures:
    """Median of each figure of each way."""
    return {
        way: {key: statistics.median(run[key] for run in repeated) for key in repeated[0]}
        for way, repeated in runs.items()
    }


def head_of(case: dict[str, Any]) -> str:
    """The size of the model, how many ranks there are, and what limits them."""
    size = f'{case["parameters"] / 1e9:.2f} B parameters, {case["nbytes"] / 1e9:.2f} GB, {case["ranks"]} ranks'
    limit = case.get('limit_nbytes_per_sec', 0) / 1e6
    return f'{size}, none of which can write more than {limit:.0f} MB/s' if limit else size


def _table(head: str, found: Figures, columns: list[Column]) -> str:
    return '\n'.join([f'{head}:', '', *_rows(found, columns), ''])


def _rows(found: Figures, columns: list[Column]) -> list[str]:
    """Headings and rows; a column without any figures is left out."""
    cells = [[cell(way, figures) for way, figures in found.items()] for _, cell in columns]
    shown = [(heading, column) for (heading, _), column in zip(columns, cells, strict=True) if any(column)]
    lines = [f'| way | {" | ".join(heading for heading, _ in shown)} |', '|---' * (1 + len(shown)) + '|']
    for number, way in enumerate(found):
        values = ''.join(f' {column[number]} |' if column[number] else ' |' for _, column in shown)
        lines.append(f'| {way} |{values}')
    return lines


def _figure(key: str, words: str) -> Callable[[str, dict[str, float]], str | None]:
    return lambda _, figures: words.format(figures[key]) if key in figures else None


_SECONDS: Column = ('seconds', _figure('seconds', '{:.2f}'))


def _times_faster_than(other: dict[str, float] | None) -> Callable[[str, dict[str, float]], str | None]:
    return lambda _, figures: f'{other["seconds"] / figures["seconds"]:.1f}' if other else None


def _save_table(case: dict[str, Any]) -> str:
    found = medians(case['runs'])
    stream = found.get(f'{OURS}stream{FSYNC_WORDS[True]}')

    def of_the_floor(way: str, figures: dict[str, float]) -> str | None:
        floor = found.get(_floor_of(way) or '')
        return f'{figures["seconds"] / floor["seconds"]:.1f}' if floor and way.startswith(OURS) else None

    def of_flat(way: str, figures: dict[str, float]) -> str | None:
        flat = found.get(way.replace(HSDP, FLAT))
        return f'{figures["seconds"] / flat["seconds"]:.2f}' if flat and way.endswith(HSDP) else None

    columns: list[Column] = [
        _SECONDS,
        ("times faster than XTuner's hook", _times_faster_than(found.get(XTUNER))),
        ('times faster than stream', _times_faster_than(stream if case.get('limit_nbytes_per_sec') else None)),
        ('times its floor', of_the_floor),
        ('times FSDP2', of_flat),
        ('extra memory, MB', _figure('peak_extra_mb', '{:.0f}')),
        ('sent to other ranks, MB', _figure('sent_mb', '{:.0f}')),
    ]
    return _table(head_of(case), found, columns)


def _floor_of(way: str) -> str | None:
    """What writes as many bytes, and as many ranks do. None where sending takes as long as writing."""
    if FSYNC in way:
        return f'{FLOOR_ALL if "positional" in way or "parallel" in way else FLOOR}{FSYNC}'
    return FLOOR_ALL if 'positional' in way else None


def summary(measured: dict[str, Any]) -> str:
    """The README's six rows of ``save``."""
    found = medians(measured['cases'][0]['runs'])
    ours = [f'{OURS}{writer}{FSYNC_WORDS[False]}' for writer in ('positional', 'parallel', 'stream')]
    columns: list[Column] = [
        _SECONDS,
        ("times faster than XTuner's hook", _times_faster_than(found[XTUNER])),
        ('extra memory, MB', _figure('peak_extra_mb', '{:.0f}')),
    ]
    rows = _rows({way: found[way] for way in (*ours, XTUNER, ACCELERATE, DCP)}, columns)
    return '\n'.join([*rows, ''])


def _memory_table(cases: list[dict[str, Any]]) -> str:
    sizes = sorted({case['parameters'] for case in cases})
    lines = [
        f'`bucket_size` {BUCKET_NBYTES / 1e6:.0f} MB; extra memory of rank 0 / of the busiest other, MB:',
        '',
        f'| way | ranks | {" | ".join(f"{size / 1e9:.2f} B" for size in sizes)} | sent, of the model |',
        '|---' * (3 + len(sizes)) + '|',
    ]
    for n_ranks in sorted({case['ranks'] for case in cases}):
        by_size = {case['parameters']: medians(case['runs']) for case in cases if case['ranks'] == n_ranks}
        (nbytes,) = {case['nbytes'] for case in cases if (case['ranks'], case['parameters']) == (n_ranks, sizes[-1])}
        for way, of_largest in by_size[sizes[-1]].items():
            found = [by_size[size][way] for size in sizes]
            peaks = [f'{figures["peak_rank0_mb"]:.0f} / {figures["peak_others_mb"]:.0f}' for figures in found]
            share = of_largest['sent_mb'] * 1e6 / nbytes
            lines.append(f'| {way.partition(", ")[0]} | {n_ranks} | {" | ".join(peaks)} | {share:.0%} |')
    return '\n'.join([*lines, ''])


def _stall_table(case: dict[str, Any]) -> str:
    found = medians(case['runs'])
    xtuner, waited = found[XTUNER]['stalled_secs'], found[SYNC]['save_secs']

    def rate(way: str, figures: dict[str, float]) -> str:
        return f'{figures["iterations_per_sec"] if way in (ASYNC, NO_SAVE) else 0:.2f}'

    def times_as_long(way: str, figures: dict[str, float]) -> str | None:
        return f'{figures["save_secs"] / waited:.1f}' if way == ASYNC else None

    columns: list[Column] = [
        ('training stalled, s', _figure('stalled_secs', '{:.2f}')),
        ("of XTuner's hook", lambda _, figures: f'{figures["stalled_secs"] / xtuner:.1%}'),
        ('save, s', lambda _, figures: f'{figures.get("save_secs", 0.0):.2f}'),
        ('iterations per second meanwhile', rate),
        ('of without', _figure('speed_share', '{:.0%}')),
        ('save, times as long as where training waits', times_as_long),
    ]
    return _table(head_of(case), found, columns)


def _convert_table(case: dict[str, Any]) -> str:
    found = medians(case['runs'])
    ours = found[_CONVERT]['seconds']
    head = (
        f'{case["parameters"] / 1e9:.2f} B parameters, {case["checkpoint_nbytes"] / 1e9:.1f} GB of checkpoint, '
        f'{case["read_nbytes"] / 1e9:.2f} GB to read and {case["written_nbytes"] / 1e9:.2f} GB to write'
    )
    columns: list[Column] = [
        _SECONDS,
        ('xhf-convert is faster, times', lambda _, figures: f'{figures["seconds"] / ours:.1f}'),
        ('peak anonymous memory, MB', _figure('peak_mb', '{:.0f}')),
    ]
    return _table(head, found, columns)


def _upload_table(case: dict[str, Any]) -> str:
    found = medians(case['runs'])
    slowest = max(found.values(), key=lambda figures: figures['seconds'])
    columns: list[Column] = [
        _SECONDS,
        ('times faster', _times_faster_than(slowest)),
        ('sent by rank 0, MB', _figure('sent_mb', '{:.0f}')),
    ]
    uplink = case['uplink_nbytes_per_sec']
    least_secs = case['nbytes'] / uplink / case['ranks']
    head = (
        f'{case["nbytes"] / 1e6:.0f} MB, {case["ranks"]} ranks, none of which can send more than '
        f'{uplink / 1e6:.0f} MB/s (all together need {least_secs:.2f} s)'
    )
    training = case['training']
    slowed, n_ranks = [run['slowed_by'] for run in training['runs']], training['ranks']
    processor = statistics.median(run['processor'] for run in training['runs'])
    beside = (
        f'While an upload with {training["uplink_nbytes_per_sec"] / 1e6:.0f} MB/s is running, training on '
        f'{n_ranks} rank{"s" * (n_ranks > 1)} is slowed by {statistics.median(slowed):.1%} of its iterations '
        f'(median of {len(slowed)}; {min(slowed):.1%} to {max(slowed):.1%}). The threads that upload take '
        f'{processor:.1%} of a core.\n'
    )
    return f'{_table(head, found, columns)}\n{beside}'


def describe_machine() -> dict[str, Any]:
    """The machine, and how busy it was."""
    model = next((line for line in Path('/proc/cpuinfo').read_text().splitlines() if 'model name' in line), '')
    return {
        'cpu': model.partition(':')[2].strip() or platform.machine(),
        'cores': os.cpu_count(),
        'load': os.getloadavg()[0],
        'python': platform.python_version(),
    }
