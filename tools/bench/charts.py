"""The chart of each benchmark, made only from its JSON: one bar for each way and figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.report import Figures, fastest, medians, size_words
from bench.ways import OURS

_SAVE = (('seconds', 'seconds per save', '{:.2f}'), ('peak_extra_mb', 'extra memory of the busiest rank, MB', '{:.0f}'))
#: Title, and of each column the figure, its heading and its format.
CHARTS: dict[str, tuple[str, tuple[tuple[str, str, str], ...]]] = {
    'save': ('Saving a ZeRO-3 model', _SAVE),
    'floors': ('Saving a ZeRO-3 model, and what disk and loopback allow', _SAVE),
    'hsdp': ('Saving two replicas of shards', _SAVE),
    'throttled': ('Saving to a share that limits each client', _SAVE[:1]),
    'memory': (
        'What a save takes of memory and network',
        (
            ('peak_rank0_mb', 'extra memory of rank 0, MB', '{:.0f}'),
            ('peak_others_mb', 'of the busiest other, MB', '{:.0f}'),
            ('sent_mb', 'sent, MB', '{:.0f}'),
        ),
    ),
    'stall': (
        'What a save takes from training',
        (
            ('stalled_secs', 'training stands still, s', '{:.2f}'),
            ('speed_share', 'speed of training meanwhile', '{:.0%}'),
        ),
    ),
    'upload': (
        'A save to an object store',
        (('seconds', 'seconds', '{:.2f}'), ('sent_mb', 'sent by rank 0, MB', '{:.0f}')),
    ),
    'convert': (
        'Converting a ZeRO-3 checkpoint',
        (('seconds', 'seconds per conversion', '{:.2f}'), ('peak_mb', 'peak anonymous memory, MB', '{:.0f}')),
    ),
}
_OURS_COLOR, _FLOOR_COLOR, _OTHER_COLOR = '#1a7f5a', '#b5482a', '#a3acb7'


def sections(what: str, measured: dict[str, Any]) -> list[tuple[str, Figures]]:
    """Title and figures of each part, the fastest way first."""
    found = []
    for part in measured.get('sizes') or measured.get('cases') or [measured]:
        n_ranks = part.get('ranks', measured.get('ranks'))
        figures = fastest(medians(part['limited_runs' if what == 'throttled' else 'runs']))
        if 'seconds' in next(iter(figures.values())):
            figures = dict(sorted(figures.items(), key=lambda item: item[1]['seconds']))
        size = size_words(part) if 'parameters' in part else f'{part["nbytes"] / 1e9:.2f} GB'
        found.append((f'{size}, {n_ranks} ranks' if n_ranks else size, figures))
    return found


def draw(what: str, measured: dict[str, Any], path: Path) -> None:
    """Write the chart of ``docs/bench/WHAT.json`` as SVG, the same bytes each time with one version of matplotlib."""
    import matplotlib.pyplot as plt

    title, columns = CHARTS[what]
    parts = sections(what, measured)
    heights = [len(figures) + 1 for _, figures in parts]
    style = {'svg.hashsalt': 'xhf_hooks', 'svg.fonttype': 'none', 'font.size': 9, 'axes.spines.right': False}
    with plt.rc_context({**style, 'axes.spines.top': False, 'axes.spines.bottom': False, 'xtick.bottom': False}):
        figure, axes = plt.subplots(
            *(len(parts), len(columns)), squeeze=False, sharex='col', sharey='row', layout='constrained',
            figsize=(11, 0.36 * sum(heights) + 1.2), height_ratios=heights,
        )  # fmt: skip
        figure.suptitle(title, weight='bold')
        machine = measured['machine']
        medians_of = f'medians of {measured["repeats"]} runs in random order; ' if 'repeats' in measured else ''
        figure.supxlabel(f'{medians_of}{machine["cpu"]}, {machine["cores"]} cores', size=8)
        for (head, figures), row in zip(parts, axes, strict=True):
            for (key, heading, words), axis in zip(columns, row, strict=True):
                bars = axis.barh(range(len(figures)), [found.get(key, 0.0) for found in figures.values()])
                for bar, way in zip(bars, figures, strict=True):
                    bar.set_color(_color(way))
                texts = [words.format(found[key]) if key in found else '' for found in figures.values()]
                axis.bar_label(bars, texts, padding=3)
                axis.set_title(heading if axis is not row[0] else f'{head}\n{heading}', loc='left', size=9)
                axis.set_xticklabels([])
                axis.margins(x=0.25)
            row[0].set_yticks(range(len(figures)), [_label(way) for way in figures])
            row[0].set_ylim(len(figures) - 0.4, -0.6)
        figure.savefig(path, format='svg', metadata={'Date': None})
        plt.close(figure)


def _label(way: str) -> str:
    name, _, detail = way.partition(': ' if ': ' in way else ', ')
    return f'{name}\n{detail}' if len(way) > 30 else way


def _color(way: str) -> str:
    if way.startswith('floor'):
        return _FLOOR_COLOR
    return _OURS_COLOR if way.startswith((OURS, 'xhf-convert', 'upload_to')) else _OTHER_COLOR
