"""Draw the scalars of a run's saves like TensorBoard: a card for each, over the iterations.

    python tools/demo/scalars.py work_dirs/demo/<timestamp>/vis_data/scalars.json --out docs/run

Writes scalars.json (the lines of the saves) and scalars.svg, which docs/getting-started.md shows.
"""

import argparse
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

PREFIX = 'hf_checkpoint/'
COLUMNS, WIDTH, HEIGHT, GAP = 3, 290, 150, 14  # number of cards in a row; size of a card in pixels
LEFT, TOP, BOTTOM = 52, 34, 24  # inside a card, around its curve
STYLE = """
svg { font-family: -apple-system, BlinkMacSystemFont, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif; }
text { fill: #1f2328; font-size: 12px; } .small { fill: #59636e; font-size: 10.5px; }
.page { fill: #ffffff; } .card { fill: none; stroke: #d1d9e0; } .axis { stroke: #d1d9e0; }
.curve { fill: none; stroke: #1a7f5a; stroke-width: 1.8; } .save { fill: #1a7f5a; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .small { fill: #9198a1; } .page { fill: #0d1117; }
.card, .axis { stroke: #3d444d; } .curve { stroke: #2fb380; } .save { fill: #2fb380; }
}"""


def saves_of(text: str) -> list[dict[str, float]]:
    """Return the lines that saves left in MMEngine's scalars.json."""
    return [found for found in map(json.loads, text.splitlines()) if f'{PREFIX}seconds' in found]


def svg(saves: list[dict[str, float]]) -> str:
    """Return the file's text: a card for each scalar, in the order in which the hook logs them."""
    tags = [tag for tag in saves[0] if tag.startswith(PREFIX)]
    width = COLUMNS * (WIDTH + GAP) + GAP
    height = -(-len(tags) // COLUMNS) * (HEIGHT + GAP) + GAP
    body: list[str] = []
    for number, tag in enumerate(tags):
        row, column = divmod(number, COLUMNS)
        body.append(f'<g transform="translate({GAP + column * (WIDTH + GAP)} {GAP + row * (HEIGHT + GAP)})">')
        body += card(tag, [(save['step'], save[tag]) for save in saves])
        body.append('</g>')
    return '\n'.join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label="The scalars of a run\'s saves">',
            f'<style>{STYLE}\n</style>',
            f'<rect class="page" width="{width}" height="{height}"/>',
            *body,
            '</svg>\n',
        ]
    )


def card(tag: str, points: list[tuple[float, float]]) -> Iterator[str]:
    """Yield a title, the ends of the scale and a curve. The scale starts at 0, unless all values are similar."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low = min(values) if 0.9 * max(values) < min(values) < max(values) else 0.0
    span, steps_span = (max(values) - low) or 1.0, (max(steps) - min(steps)) or 1.0
    places = [
        (
            LEFT + (step - min(steps)) / steps_span * (WIDTH - LEFT - 16),
            HEIGHT - BOTTOM - (value - low) / span * (HEIGHT - TOP - BOTTOM),
        )
        for step, value in points
    ]
    yield f'<rect class="card" width="{WIDTH}" height="{HEIGHT}" rx="4"/>'
    yield f'<text x="10" y="20">{escape(tag)}</text>'
    for value, y in ((low + span, TOP), (low, HEIGHT - BOTTOM)):
        yield f'<line class="axis" x1="{LEFT}" y1="{y}" x2="{WIDTH - 16}" y2="{y}"/>'
        yield f'<text class="small" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.3g}</text>'
    for step, x in ((min(steps), LEFT), (max(steps), WIDTH - 16)):
        yield f'<text class="small" x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{step:g}</text>'
    yield f'<polyline class="curve" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'
    yield from (f'<circle class="save" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in places)


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
    (args.out / 'scalars.svg').write_text(svg(saves))


if __name__ == '__main__':
    main()
