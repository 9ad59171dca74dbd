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
    BY,
    DCP,
    FLAT,
    FLOOR_ALL,
    FLOOR_ALL_FSYNC,
    FLOOR_FSYNC,
    FLOOR_SENT,
    FSYNC_WORDS,
    HSDP,
    NO_SAVE,
    OURS,
    SYNC,
    XTUNER,
    name_of_ours,
)

_STREAM = f'{OURS}stream'
_CONVERT = 'xhf-convert'
Runs = dict[str, list[dict[str, float]]]
Figures = dict[str, dict[str, float]]
#: A heading, and a function that returns a way's text in that column, if any.
Column = tuple[str, Callable[[str, dict[str, float]], str | None]]


def table(what: str, measured: dict[str, Any]) -> str:
    """The table in Markdown."""
    whole = {
        'memory': _memory_table,
        'upload': _upload_table,
    }
    if what in whole:
        return whole[what](measured)
    if what == 'throttled':
        return '\n'.join(map(_throttled_table, measured['cases']))
    of_saves = dict.fromkeys(('save', 'floors', 'hsdp'), _save_table)
    table_of = {**of_saves, 'stall': _stall_table, 'convert': _convert_table}[what]
    return '\n'.join(table_of(size) for size in measured['sizes'])


def medians(runs: Runs) -> Figures:
    """Median of each figure of each way."""
    return {
        way: {key: statistics.median(run[key] for run in repeated) for key in repeated[0]}
        for way, repeated in runs.items()
    }


def fastest(found: Figures) -> Figures:
    """For floors that can be reached in several ways, only the fastest."""
    best: dict[str, str] = {}
    for way, figures in found.items():
        floor = way.partition(BY)[0]
        if floor not in best or figures['seconds'] < found[best[floor]]['seconds']:
            best[floor] = way
    return {floor: found[way] for floor, way in best.items()}


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


def _save_table(size: dict[str, Any]) -> str:
    found = fastest(medians(size['runs']))
    xtuner = found.get(XTUNER, {}).get('seconds')

    def of_the_floor(way: str, figures: dict[str, float]) -> str | None:
        floor = found.get(_floor_of(way))
        return f'{figures["seconds"] / floor["seconds"]:.1f}' if floor and way.startswith(OURS) else None

    def of_flat(way: str, figures: dict[str, float]) -> str | None:
        flat = found.get(way.replace(HSDP, FLAT))
        return f'{figures["seconds"] / flat["seconds"]:.2f}' if flat and way.endswith(HSDP) else None

    columns: list[Column] = [
        ('seconds', _figure('seconds', '{:.2f}')),
        ("times faster than XTuner's hook", lambda _, f: f'{xtuner / f["seconds"]:.1f}' if xtuner else None),
        ('times its floor', of_the_floor),
        ('times FSDP2', of_flat),
        ('extra memory, MB', _figure('peak_extra_mb', '{:.0f}')),
        ('sent to other ranks, MB', _figure('sent_mb', '{:.0f}')),
    ]
    return '\n'.join([f'{size_words(size)}:', '', *_rows(found, columns), ''])


def _floor_of(way: str) -> str:
    """What moves as many bytes in the same way. The fastest method of each floor has no name of its own here."""
    if FSYNC_WORDS[True] in way:
        return FLOOR_ALL_FSYNC if 'positional' in way or 'parallel' in way else FLOOR_FSYNC
    return FLOOR_ALL if 'positional' in way else FLOOR_SENT


def summary(measured: dict[str, Any]) -> str:
    """The README's six rows of ``save``."""
    found = fastest(medians(measured['sizes'][0]['runs']))
    ours = [name_of_ours(writer, fsync=False) for writer in ('positional', 'parallel', 'stream')]
    xtuner = found[XTUNER]['seconds']
    columns: list[Column] = [
        ('seconds', _figure('seconds', '{:.2f}')),
        ("times faster than XTuner's hook", lambda _, f: f'{xtuner / f["seconds"]:.1f}'),
        ('extra memory, MB', _figure('peak_extra_mb', '{:.0f}')),
    ]
    rows = _rows({way: found[way] for way in (*ours, XTUNER, ACCELERATE, DCP)}, columns)
    return '\n'.join([*rows, ''])


def _throttled_table(case: dict[str, Any]) -> str:
    found = medians(case['limited_runs'])
    limit = case['limit_nbytes_per_sec'] / 1e6
    stream = found.get(_STREAM, {}).get('seconds')

    def least(_: str, figures: dict[str, float]) -> str | None:
        if 'written_by_busiest_mb' not in figures:
            return None
        return f'{figures["written_by_busiest_mb"] / limit:.2f}'

    columns: list[Column] = [
        ('seconds', _figure('seconds', '{:.2f}')),
        ('times faster than stream', lambda _, f: f'{stream / f["seconds"]:.1f}' if stream else None),
        ('least that the limit allows, s', least),
    ]
    head = f'{size_words(case)}, {case["ranks"]} ranks, none of which can write more than {limit:.0f} MB/s:'
    return '\n'.join([head, '', *_rows(found, columns), ''])


def _memory_table(measured: dict[str, Any]) -> str:
    sizes = sorted({case['parameters'] for case in measured['cases']})
    lines = [
        f'`bucket_size` {measured["bucket_nbytes"] / 1e6:.0f} MB; extra memory of rank 0 / of the busiest other, MB:',
        '',
        f'| way | ranks | {" | ".join(f"{size / 1e9:.2f} B" for size in sizes)} | sent, of the model |',
        '|---' * (3 + len(sizes)) + '|',
    ]
    for n_ranks in sorted({case['ranks'] for case in measured['cases']}):
        by_size = {case['parameters']: case for case in measured['cases'] if case['ranks'] == n_ranks}
        for way in next(iter(by_size.values()))['runs']:
            cells = []
            for size in sizes:
                figures = medians(by_size[size]['runs'])[way]
                cells.append(f'{figures["peak_rank0_mb"]:.0f} / {figures["peak_others_mb"]:.0f}')
            largest = by_size[sizes[-1]]
            share = medians(largest['runs'])[way]['sent_mb'] * 1e6 / largest['nbytes']
            lines.append(f'| {way.partition(", ")[0]} | {n_ranks} | {" | ".join(cells)} | {share:.0%} |')
    return '\n'.join([*lines, ''])


def _stall_table(size: dict[str, Any]) -> str:
    found = medians(size['runs'])
    xtuner = found[XTUNER]['stalled_secs']
    waited = found.get(SYNC, {}).get('save_secs')

    def rate(way: str, figures: dict[str, float]) -> str:
        return f'{figures["iterations_per_sec"] if way in (ASYNC, NO_SAVE) else 0:.2f}'

    columns: list[Column] = [
        ('training stalled, s', _figure('stalled_secs', '{:.2f}')),
        ("of XTuner's hook", lambda _, f: f'{f["stalled_secs"] / xtuner:.1%}'),
        ('save, s', lambda way, f: f'{f.get("save_secs", 0.0):.2f}'),
        ('iterations per second meanwhile', rate),
        ('of without', _figure('speed_share', '{:.0%}')),
        (
            'save, times as long as where training waits',
            lambda way, f: f'{f["save_secs"] / waited:.1f}' if waited and way == ASYNC else None,
        ),
    ]
    return '\n'.join([f'{size_words(size)}:', '', *_rows(found, columns), ''])


def _convert_table(size: dict[str, Any]) -> str:
    found = medians(size['runs'])
    head = (
        f'{size["parameters"] / 1e9:.2f} B parameters, {size["checkpoint_nbytes"] / 1e9:.1f} GB of checkpoint, '
        f'{size["read_nbytes"] / 1e9:.2f} GB to read and {size["written_nbytes"] / 1e9:.2f} GB to write:'
    )
    columns: list[Column] = [
        ('seconds', _figure('seconds', '{:.2f}')),
        ('xhf-convert is faster, times', lambda _, f: f'{f["seconds"] / found[_CONVERT]["seconds"]:.1f}'),
        ('peak anonymous memory, MB', _figure('peak_mb', '{:.0f}')),
    ]
    return '\n'.join([head, '', *_rows(found, columns), ''])


def _upload_table(measured: dict[str, Any]) -> str:
    found = medians(measured['runs'])
    slowest = max(figures['seconds'] for figures in found.values())
    columns: list[Column] = [
        ('seconds', _figure('seconds', '{:.2f}')),
        ('times faster', lambda _, f: f'{slowest / f["seconds"]:.1f}'),
        ('sent by rank 0, MB', _figure('sent_mb', '{:.0f}')),
    ]
    uplink = measured['uplink_nbytes_per_sec'] / 1e6
    least = measured['nbytes'] / measured['uplink_nbytes_per_sec'] / measured['ranks']
    head = (
        f'{measured["nbytes"] / 1e6:.0f} MB, {measured["ranks"]} ranks, none of which can send more than '
        f'{uplink:.0f} MB/s (all together need {least:.2f} s):'
    )
    training = measured['training']
    slowed, n_ranks = [run['slowed_by'] for run in training['runs']], training['ranks']
    processor = statistics.median(run['processor'] for run in training['runs'])
    beside = (
        f'While an upload with {training["uplink_nbytes_per_sec"] / 1e6:.0f} MB/s is running, training on '
        f'{n_ranks} rank{"s" * (n_ranks > 1)} is slowed by {statistics.median(slowed):.1%} of its iterations '
        f'(median of {len(slowed)}; {min(slowed):.1%} to {max(slowed):.1%}). The threads that upload take '
        f'{processor:.1%} of a core.'
    )
    return '\n'.join([head, '', *_rows(found, columns), '', beside, ''])


def size_words(size: dict[str, Any]) -> str:
    """The size of the model in words."""
    nbytes = size['nbytes'] if 'nbytes' in size else size['written_nbytes']
    return f'{size["parameters"] / 1e9:.2f} B parameters, {nbytes / 1e9:.2f} GB'


def describe_machine() -> dict[str, Any]:
    """The machine, and how busy it was."""
    model = next((line for line in Path('/proc/cpuinfo').read_text().splitlines() if 'model name' in line), '')
    return {
        'cpu': model.partition(':')[2].strip() or platform.machine(),
        'cores': os.cpu_count(),
        'load': os.getloadavg()[0],
        'python': platform.python_version(),
    }
