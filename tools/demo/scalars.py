"""Draw the scalars of a run's saves like TensorBoard: a card for each, over the iterations.

    python tools/demo/scalars.py work_dirs/demo/<timestamp>/vis_data/scalars.json --out docs/run

Writes scalars.json (the lines of the saves) and scalars.svg, which docs/getting-started.md shows.
"""

import argparse
import json
from pathlib import Path

PREFIX = 'hf_checkpoint/'
COLUMNS = 3


def saves_of(text: str) -> list[dict[str, float]]:
    """Return the lines that saves left in MMEngine's scalars.json."""
    return [found for found in map(json.loads, text.splitlines()) if f'{PREFIX}seconds' in found]


def draw(saves: list[dict[str, float]], path: Path) -> None:
    """Write the SVG: a curve for each scalar, in the order in which the hook logs them."""
    import matplotlib.pyplot as plt

    tags = [tag for tag in saves[0] if tag.startswith(PREFIX)]
    rows = -(-len(tags) // COLUMNS)
    with plt.rc_context({'svg.hashsalt': 'xhf_hooks', 'svg.fonttype': 'none', 'font.size': 8}):
        figure, axes = plt.subplots(rows, COLUMNS, squeeze=False, layout='constrained', figsize=(9, 1.6 * rows))
        for axis, tag in zip(axes.flat, tags, strict=False):
            axis.plot([save['step'] for save in saves], [save[tag] for save in saves], 'o-', color='#1a7f5a', ms=3)
            axis.set_title(tag, loc='left')
            axis.set_ylim(bottom=0)
        for axis in axes.flat[len(tags) :]:
            axis.axis('off')
        figure.savefig(path, format='svg', metadata={'Date': None})
        plt.close(figure)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Draw the scalars of a run's saves.")
    parser.add_argument('scalars', type=Path, help='vis_data/scalars.json of a run')
    parser.add_argument('--out', type=Path, required=True, metavar='DIR', help='folder for the two files')
    args = parser.parse_args()
    saves = saves_of(args.scalars.read_text())
    if not saves:
        parser.error(f'{args.scalars}: no save is logged there')
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / 'scalars.json').write_text(''.join(f'{json.dumps(save)}\n' for save in saves))
    draw(saves, args.out / 'scalars.svg')


if __name__ == '__main__':
    main()
