"""The tables of ``tools/bench.py``, made only from its JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import ways

Figures = dict[str, float]
#: Returns a way's text in a column, if any.
Cell = Callable[[str, Figures], str | None]


def table(what: str, measured: dict[str, Any]) -> str:
    """The tables in Markdown, one for each case."""
    if what == 'memory':
        return _memory_table(measured['cases'])
    table_of = {'stall': _stall_table, 'convert': _convert_table, 'upload': _upload_table, 'start': _start_table}.get(
        what, _save_table
    )
    return '\n'.join(table_of(case) for case in measured['cases'])


def medians(case: dict[str, Any]) -> dict[str, Figures]:
    """Median of each figure of each way."""
    return {
        way: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for way, runs in case['runs'].items()
    }


def head_of(case: dict[str, Any]) -> str:
    """The size of the model, how many ranks there are, and what limits them."""
    size = f'{case["parameters"] / 1e9:.2f} B parameters, {case["nbytes"] / 1e9:.2f} GB, {case["ranks"]} ranks'
    limit = case.get('limit_nbytes_per_sec', 0) / 1e6
    return f'{size}, none of which can write more than {limit:.0f} MB/s' if limit else size


def _table(head: str, found: dict[str, Figures], columns: dict[str, Cell]) -> str:
    return '\n'.join([f'{head}:', '', *_rows(found, columns), ''])


def _rows(found: dict[str, Figures], columns: dict[str, Cell]) -> list[str]:
    """Headings and rows; a column without any figures is left out."""
    texts = {heading: [cell(way, found[way]) for way in found] for heading, cell in columns.items()}
    shown = {heading: column for heading, column in texts.items() if any(column)}
    lines = [f'| way | {" | ".join(shown)} |', '|---' * (1 + len(shown)) + '|']
    for way, *values in zip(found, *shown.values(), strict=True):
        lines.append(f'| {way} |' + ''.join(f' {value} |' if value else ' |' for value in values))
    return lines


def _figure(key: str, words: str) -> Cell:
    return lambda _, figures: words.format(figures[key]) if key in figures else None


def _times_faster_than(other: Figures | None) -> Cell:
    return lambda _, figures: f'{other["seconds"] / figures["seconds"]:.1f}' if other else None


SECONDS = _figure('seconds', '{:.2f}')
EXTRA_MEMORY = _figure('peak_extra_mb', '{:.0f}')
SENT = _figure('sent_mb', '{:.0f}')


def _save_table(case: dict[str, Any]) -> str:
    measured = medians(case)
    order = [*ways.ways_of('save'), *ways.ways_of('hsdp')]
    found = {way: measured[way] for way in order if way in measured}
    stream = found.get(f'{ways.OURS}stream{ways.AS_THE_HOOK}') if case.get('limit_nbytes_per_sec') else None

    def times(other: str | None, figures: Figures, words: str) -> str | None:
        return words.format(figures['seconds'] / found[other]['seconds']) if other in found else None

    columns = {
        'seconds': SECONDS,
        "speed (XTuner's hook: 1.0)": _times_faster_than(found.get(ways.XTUNER)),
        'speed (stream: 1.0)': _times_faster_than(stream),
        'times its floor': lambda way, figures: times(_floor_of(way), figures, '{:.1f}'),
        'times FSDP2': lambda way, figures: times(_flat_of(way), figures, '{:.2f}'),
        'extra memory, MB': EXTRA_MEMORY,
        'sent to other ranks, MB': SENT,
    }
    return _table(head_of(case), found, columns)


def _floor_of(way: str) -> str | None:
    """What writes as many bytes, and as many ranks do. None where sending takes as long as writing."""
    if way.endswith(ways.AS_THE_HOOK):
        return f'{ways.FLOOR_ALL if "positional" in way or "parallel" in way else ways.FLOOR}{ways.FSYNC}'
    return ways.FLOOR_ALL if 'positional' in way else None


def _flat_of(way: str) -> str | None:
    return way.replace(ways.HSDP, ways.FLAT) if way.endswith(ways.HSDP) else None


def summary(save: dict[str, Any]) -> str:
    """The README's rows, of the benchmark ``save``."""
    found = medians(save['cases'][0])
    ours = [f'{ways.OURS}positional{fsync}' for fsync in (ways.AS_THE_HOOK, ways.NO_FSYNC)]
    columns = {
        'seconds': SECONDS,
        "speed (XTuner's hook: 1.0)": _times_faster_than(found[ways.XTUNER]),
        'extra memory, MB': EXTRA_MEMORY,
    }
    rows = _rows({way: found[way] for way in (*ours, ways.XTUNER, ways.ACCELERATE, ways.DCP)}, columns)
    return '\n'.join([*rows, ''])


def _memory_table(cases: list[dict[str, Any]]) -> str:
    sizes = sorted({case['parameters'] for case in cases})
    lines = [
        f'`bucket_size` {ways.BUCKET_NBYTES / 1e6:.0f} MB; extra memory of rank 0 / of the busiest other, MB:',
        '',
        f'| way | ranks | {" | ".join(f"{size / 1e9:.2f} B" for size in sizes)} | sent, of the model |',
        '|---' * (3 + len(sizes)) + '|',
    ]
    for n_ranks in sorted({case['ranks'] for case in cases}):
        of_ranks = sorted((case for case in cases if case['ranks'] == n_ranks), key=lambda case: case['parameters'])
        for way in of_ranks[-1]['runs']:
            found = [medians(case)[way] for case in of_ranks]
            peaks = [f'{figures["peak_rank0_mb"]:.0f} / {figures["peak_others_mb"]:.0f}' for figures in found]
            share = found[-1]['sent_mb'] * 1e6 / of_ranks[-1]['nbytes']
            lines.append(f'| {way.partition(", ")[0]} | {n_ranks} | {" | ".join(peaks)} | {share:.0%} |')
    return '\n'.join([*lines, ''])


def _stall_table(case: dict[str, Any]) -> str:
    found = medians(case)
    xtuner, waited = found[ways.XTUNER]['stalled_secs'], found[ways.SYNC]['save_secs']
    columns = {
        'training stalled, s': _figure('stalled_secs', '{:.2f}'),
        "of XTuner's hook": lambda _, figures: f'{figures["stalled_secs"] / xtuner:.1%}',
        'save, s': lambda _, figures: f'{figures.get("save_secs", 0):.2f}',
        'iterations per second meanwhile': lambda _, figures: f'{figures.get("iterations_per_sec", 0):.2f}',
        'of without': _figure('speed_share', '{:.0%}'),
        'save, times as long as where training waits': lambda way, figures: (
            f'{figures["save_secs"] / waited:.1f}' if way == ways.ASYNC else None
        ),
    }
    return _table(head_of(case), found, columns)


def _convert_table(case: dict[str, Any]) -> str:
    found = medians(case)
    ours = found['xhf-convert']['seconds']
    head = (
        f'{case["parameters"] / 1e9:.2f} B parameters, {case["checkpoint_nbytes"] / 1e9:.1f} GB of checkpoint, '
        f'{case["read_nbytes"] / 1e9:.2f} GB to read and {case["written_nbytes"] / 1e9:.2f} GB to write'
    )
    columns = {
        'seconds': SECONDS,
        'xhf-convert is faster, times': lambda _, figures: f'{figures["seconds"] / ours:.1f}',
        'peak anonymous memory, MB': _figure('peak_mb', '{:.0f}'),
    }
    return _table(head, found, columns)


def _start_table(case: dict[str, Any]) -> str:
    columns = {
        'tensors in files': _figure('tensors', '{:.0f}'),
        'seconds': SECONDS,
        'CPU seconds': _figure('cpu_secs', '{:.1f}'),
        'of these, loading by transformers': _figure('loading_cpu_secs', '{:.1f}'),
        'imports and the model, s': _figure('imports_and_model_secs', '{:.1f}'),
    }
    return _table('One process, the model on the meta device', medians(case), columns)


def _upload_table(case: dict[str, Any]) -> str:
    found = medians(case)
    slowest = max(found.values(), key=lambda figures: figures['seconds'])
    columns = {'seconds': SECONDS, 'times faster': _times_faster_than(slowest), 'sent by rank 0, MB': SENT}
    uplink = case['uplink_nbytes_per_sec']
    least_secs = case['nbytes'] / uplink / case['ranks']
    head = (
        f'{case["nbytes"] / 1e6:.0f} MB, {case["ranks"]} ranks, none of which can send more than '
        f'{uplink / 1e6:.0f} MB/s (all together need {least_secs:.2f} s)'
    )
    training = case['training']
    slowed = [run['slowed_by'] for run in training['runs']]
    processor = statistics.median(run['processor'] for run in training['runs'])
    beside = (
        f'While an upload with {training["uplink_nbytes_per_sec"] / 1e6:.0f} MB/s is running, training on 1 rank '
        f'is slowed by {statistics.median(slowed):.1%} of its iterations (median of {len(slowed)}; '
        f'{min(slowed):.1%} to {max(slowed):.1%}). The threads that upload take {processor:.1%} of a core.\n'
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
