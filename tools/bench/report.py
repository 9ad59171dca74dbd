"""Tables and charts of what ``tools/bench.py`` has measured."""

from __future__ import annotations

import os
import platform
import statistics
from pathlib import Path
from typing import Any

from bench.convert import OURS as CONVERT
from bench.peers import FLOOR, XTUNER
from bench.ranks import STAGES

STREAM = 'xhf_hooks stream'
Runs = dict[str, list[dict[str, float]]]


def table(what: str, measured: dict[str, Any]) -> str:
    """Markdown."""
    if what in ('plan', 'ranks', 'verify'):
        return {'plan': _plan_table, 'ranks': _ranks_table, 'verify': _verify_table}[what](measured)
    table_of = {'save': _save_table, 'stall': _stall_table, 'convert': _convert_table}[what]
    return '\n'.join(table_of(size) for size in measured['sizes'])


def medians(runs: Runs) -> dict[str, dict[str, float]]:
    """Median of each figure of each way."""
    return {
        way: {key: statistics.median(run[key] for run in repeated) for key in repeated[0]}
        for way, repeated in runs.items()
    }


def _save_table(size: dict[str, Any]) -> str:
    found = medians(size['runs'])
    lines = [
        f'{_size_words(size)}:',
        '',
        "| way | seconds | times faster than XTuner's hook | times the floor | extra memory, MB |",
        '|---|---|---|---|---|',
    ]
    for way, figures in found.items():
        faster = found[XTUNER]['seconds'] / figures['seconds']
        floors = figures['seconds'] / found[FLOOR]['seconds']
        lines.append(
            f'| {way} | {figures["seconds"]:.2f} | {faster:.1f} | {floors:.1f} | {figures["peak_extra_mb"]:.0f} |'
        )
    found = medians(size['limited_runs'])
    lines += [
        '',
        f'The same, where no rank can write more than {size["limit_nbytes_per_sec"] / 1e6:.0f} MB/s:',
        '',
        '| way | seconds | times faster than stream |',
        '|---|---|---|',
    ]
    for way, figures in found.items():
        lines.append(f'| {way} | {figures["seconds"]:.2f} | {found[STREAM]["seconds"] / figures["seconds"]:.1f} |')
    return '\n'.join([*lines, ''])


def _stall_table(size: dict[str, Any]) -> str:
    found = medians(size['runs'])
    alone = found['no save']['iterations_per_sec']
    lines = [
        f'{_size_words(size)}:',
        '',
        "| way | training stalled, s | of XTuner's hook | save, s | iterations per second meanwhile | of without |",
        '|---|---|---|---|---|---|',
    ]
    for way, figures in found.items():
        stalled = figures['stalled_secs'] / found[XTUNER]['stalled_secs']
        rate = figures['iterations_per_sec']
        beside = way.startswith('xhf_hooks')
        lines.append(
            f'| {way} | {figures["stalled_secs"]:.2f} | {stalled:.1%} | {figures["save_secs"]:.2f} | '
            + (f'{rate:.2f} | {rate / alone:.0%} |' if beside else f'{rate if way == "no save" else 0:.2f} | |')
        )
    return '\n'.join([*lines, ''])


def _convert_table(size: dict[str, Any]) -> str:
    found = medians(size['runs'])
    lines = [
        f'{size["parameters"] / 1e9:.2f} B parameters, {size["checkpoint_nbytes"] / 1e9:.1f} GB of checkpoint, '
        f'{size["read_nbytes"] / 1e9:.2f} GB to read and {size["written_nbytes"] / 1e9:.2f} GB to write:',
        '',
        '| way | seconds | xhf-convert is faster, times | peak anonymous memory, MB |',
        '|---|---|---|---|',
    ]
    for way, figures in found.items():
        faster = figures['seconds'] / found[CONVERT]['seconds']
        lines.append(f'| {way} | {figures["seconds"]:.2f} | {faster:.1f} | {figures["peak_mb"]:.0f} |')
    return '\n'.join([*lines, ''])


def _verify_table(measured: dict[str, Any]) -> str:
    lines = ['| verify.py | GB | reading alone, s | verifying, s | of the speed of reading |', '|---|---|---|---|---|']
    for where, runs in measured['runs'].items():
        for way, figures in medians(runs).items():
            lines.append(
                f'| {way}, {where} | {measured["nbytes"][way] / 1e9:.2f} | {figures["reading"]:.2f} | '
                f'{figures["verifying"]:.2f} | {figures["reading"] / figures["verifying"]:.0%} |'
            )
    return '\n'.join([*lines, ''])


def _plan_table(measured: dict[str, Any]) -> str:
    lines = [
        f'{measured["ranks"]} ranks, positional:',
        '',
        '| model | tensors | files | planning, s | memory, MB | writes per rank | median, KB | mean | files opened |',
        '|---|---|---|---|---|---|---|---|---|',
    ]
    for plan in measured['plans']:
        lines.append(
            f'| {plan["model"]} | {plan["tensors"]} | {plan["files"]} | {plan["seconds"]:.2f} | '
            f'{plan["memory_mb"]:.0f} | {plan["writes_per_rank"]} | {plan["median_write_nbytes"] / 1e3:.0f} | '
            f'{plan["nbytes_per_rank"] / plan["writes_per_rank"] / 1e3:.0f} | {plan["opens_per_rank"]} |'
        )
    lines += [
        '',
        'What ranks tell each other, receipts with positional, agreement where all is gathered:',
        '',
        '| model | receipts sent by a rank, MB | put together on rank 0, s | memory, MB | buckets | agreements '
        '| steps of all waits and agreements, one after the other |',
        '|---|---|---|---|---|---|---|',
    ]
    for plan in measured['plans']:
        lines.append(
            f'| {plan["model"]} | {plan["receipts_sent_nbytes"] / 1e6:.2f} | {plan["receipts_secs"]:.2f} | '
            f'{plan["receipts_memory_mb"]:.0f} | {plan["buckets"]} | {plan["agreements"]} | {plan["steps"]} |'
        )
    return '\n'.join([*lines, ''])


def _ranks_table(measured: dict[str, Any]) -> str:
    stages = [stage for stage in STAGES if stage in measured['runs'][0]['later']]
    lines = [
        f'save_hf of {measured["runs"][0]["tensors"]} tensors, positional, seconds:',
        '',
        f'| ranks | first call | later ones | of that in `cost.seconds` | {" | ".join(stages)} |',
        '|---' * (4 + len(stages)) + '|',
    ]
    for run in measured['runs']:
        later = run['later']
        figures = [run['first']['seconds'], later['seconds'], later['told'], *(later[stage] for stage in stages)]
        lines.append(f'| {run["ranks"]} | {" | ".join(f"{figure:.2f}" for figure in figures)} |')
    return '\n'.join([*lines, ''])


def _size_words(size: dict[str, Any]) -> str:
    nbytes = size['nbytes'] if 'nbytes' in size else size['written_nbytes']
    return f'{size["parameters"] / 1e9:.2f} B parameters, {nbytes / 1e9:.2f} GB'


def draw(what: str, measured: dict[str, Any], path: Path) -> None:
    """A chart of the medians, one bar a way, as an SVG."""
    import matplotlib

    matplotlib.use('svg')
    from matplotlib import pyplot

    figure_name, label = {
        'save': ('seconds', 'seconds per save'),
        'stall': ('stalled_secs', 'seconds for which a save stops training'),
        'plan': ('seconds', 'seconds of planning'),
        'ranks': ('seconds', 'seconds per call'),
        'verify': ('verifying', 'seconds of verifying'),
        'convert': ('seconds', 'seconds per conversion'),
    }[what]
    if what == 'plan':
        panels = {f'{measured["ranks"]} ranks': {plan['model']: plan for plan in measured['plans']}}
    elif what == 'ranks':
        panels = {f'{run["ranks"]} ranks': {'xhf_hooks save_hf': run['later']} for run in measured['runs']}
    elif what == 'verify':
        panels = {where: medians(runs) for where, runs in measured['runs'].items()}
    else:
        panels = {_size_words(size): medians(size['runs']) for size in measured['sizes']}
    n_bars = sum(len(found) for found in panels.values())
    figure, axes = pyplot.subplots(len(panels), squeeze=False, figsize=(9, 0.35 * n_bars + len(panels)))
    for axis, (title, found) in zip(axes[:, 0], panels.items(), strict=True):
        colors = ['tab:green' if way.startswith('xhf') else 'tab:gray' for way in found]
        bars = axis.barh(list(found), [figures[figure_name] for figures in found.values()], color=colors)
        axis.bar_label(bars, fmt='%.2f', padding=3)
        axis.invert_yaxis()
        axis.set_title(title, loc='left')
        axis.set_xlabel(label)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def describe_machine() -> dict[str, Any]:
    model = next((line for line in Path('/proc/cpuinfo').read_text().splitlines() if 'model name' in line), '')
    return {
        'cpu': model.partition(':')[2].strip() or platform.machine(),
        'cores': os.cpu_count(),
        'load': os.getloadavg()[0],
        'python': platform.python_version(),
    }
