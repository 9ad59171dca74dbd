"""Plots the differences between two models by layer."""

from __future__ import annotations

import re
from pathlib import Path

from xhf_hooks.errors import TargetError
from xhf_hooks.verify.comparison import DIFFERENT, IDENTICAL, ROUNDING, Comparison

_LAYER = re.compile(r'(?:^|\.)(?:layers?|h|blocks?|block)\.(\d+)\.')
_COLORS = {IDENTICAL: '#7f7f7f', ROUNDING: '#1f77b4', DIFFERENT: '#d62728'}


def layer_of(name: str) -> int | None:
    """The layer number in a tensor's name; None if it has none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def plot(found: Comparison, path: Path) -> None:
    """Plot the largest difference of each tensor on a logarithmic scale; identical ones are at the bottom.

    Raises:
        TargetError: The file cannot be written, or its suffix is not an image format.
    """
    from matplotlib.figure import Figure

    outside = sorted(tensor.name for tensor in found.tensors if layer_of(tensor.name) is None)
    layers = sorted({layer for tensor in found.tensors if (layer := layer_of(tensor.name)) is not None})
    names: list[int | str] = [*layers, *outside]
    columns = {name: i for i, name in enumerate(names)}
    values = [value for tensor in found.tensors for value in (tensor.max_abs, tensor.mean_abs)]
    floor = min((value for value in values if value > 0), default=1e-8) / 10
    title = ' / '.join(label.split(' (')[0][-60:] for label in (found.a, found.b))
    figure = Figure(figsize=(max(8.0, min(24.0, 0.3 * len(columns))), 6.0), layout='constrained')
    axes = figure.add_subplot()
    for verdict, color in _COLORS.items():
        tensors = [tensor for tensor in found.tensors if tensor.verdict == verdict]
        x = [columns[tensor.name if (layer := layer_of(tensor.name)) is None else layer] for tensor in tensors]
        label = f'{verdict} ({len(tensors)})'
        axes.scatter(x, [max(t.max_abs, floor) for t in tensors], s=16, color=color, label=label)
        if verdict != IDENTICAL:
            axes.scatter(x, [max(t.mean_abs, floor) for t in tensors], s=16, color=color, marker='_')
    axes.set_yscale('log')
    step = max(1, len(columns) // 60)
    axes.set_xticks(list(columns.values())[::step], [str(key)[-30:] for key in columns][::step], rotation=90)
    axes.set(xlabel='layer', ylabel='difference: largest (dot), mean (dash)', title=f'{found.verdict}: {title}')
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise TargetError(f'{path}: cannot be drawn ({error}); name a .png, .svg or .pdf file') from None
