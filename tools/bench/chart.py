"""The chart of a benchmark of saves, made only from its JSON: one bar for each way and figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.report import head_of, medians
from bench.ways import OURS

#: Figure to the heading of its column and its format.
COLUMNS = {
    'seconds': ('seconds per save', '{:.2f}'),
    'peak_extra_mb': ('extra memory of the busiest rank, MB', '{:.0f}'),
}
#: A way's first word to its color; others are gray.
COLORS = {OURS.strip(): '#1a7f5a', 'floor:': '#b5482a'}


def draw(measured: dict[str, Any], path: Path) -> None:
    """Write an SVG, the same bytes each time with one version of matplotlib; the fastest way comes first."""
    import matplotlib.pyplot as plt

    parts = []
    for case in measured['cases']:
        fastest_first = sorted(medians(case).items(), key=lambda item: item[1]['seconds'])
        parts.append((head_of(case), dict(fastest_first)))
    heights = [len(found) + 1 for _, found in parts]
    style = {'svg.hashsalt': 'xhf_hooks', 'svg.fonttype': 'none', 'font.size': 9, 'axes.spines.right': False}
    with plt.rc_context({**style, 'axes.spines.top': False, 'axes.spines.bottom': False, 'xtick.bottom': False}):
        figure, axes = plt.subplots(
            len(parts),
            len(COLUMNS),
            squeeze=False,
            sharex='col',
            sharey='row',
            layout='constrained',
            figsize=(11, 0.36 * sum(heights) + 1.2),
            height_ratios=heights,
        )
        machine = measured['machine']
        medians_of = f'medians of {measured["repeats"]} runs in random order'
        figure.supxlabel(f'{medians_of}; {machine["cpu"]}, {machine["cores"]} cores', size=8)
        for (head, found), row in zip(parts, axes, strict=True):
            colors = [COLORS.get(way.partition(' ')[0], '#a3acb7') for way in found]
            for axis, (key, (heading, words)) in zip(row, COLUMNS.items(), strict=True):
                values = [figures[key] for figures in found.values()]
                bars = axis.barh(range(len(found)), values, color=colors, edgecolor=colors)
                axis.bar_label(bars, [words.format(value) for value in values], padding=3)
                axis.set_title(heading if axis is not row[0] else f'{head}\n{heading}', loc='left', size=9)
                axis.set_xticklabels([])
                axis.margins(x=0.25)
            row[0].set_yticks(range(len(found)), [_label(way) for way in found])
            row[0].set_ylim(len(found) - 0.4, -0.6)
        figure.savefig(path, format='svg', metadata={'Date': None})
        plt.close(figure)


def _label(way: str) -> str:
    name, _, detail = way.partition(': ' if ': ' in way else ', ')
    return f'{name}\n{detail}' if len(way) > 30 else way
