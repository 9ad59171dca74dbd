"""Measure xhf_hooks side by side with its peers.

    save        saves of a ZeRO-3 model with every writer and every peer
    tensors     saves of a model of a thousand small tensors
    floors      saves with every writer, compared with how fast the disk takes as many bytes
    hsdp        saves of an HSDP model with two replicas, compared with FSDP2 of as many ranks
    throttled   saves with every writer and a limited bandwidth from each rank to the disk
    memory      memory and network traffic of every writer
    stall       how long a save stops training, and how much it slows down iterations
    upload      uploads to an object store by all ranks, compared with rank 0 alone, and beside training
    start       what is planned and checked before training, for models of 8 to 671 billion parameters
    convert     conversion of a checkpoint, compared with other converters; needs XTuner's environment
    draw        measure nothing; make tables and charts again from DIR/NAME.json

    python tools/bench.py save
    python tools/bench.py save --billions 0.8 1.6 --ways stream XTuner     two sizes, and only these rows
    python tools/bench.py draw --out docs/bench

A benchmark prints its progress, and at the end a table of medians. It writes the table and the JSON behind it to
DIR/NAME.md and DIR/NAME.json, and of saves a chart to DIR/NAME.svg. docs/performance.md explains the results.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from datetime import date
from pathlib import Path
from typing import Any

# For what bench shares with tests/helpers
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import convert, start
from bench.chart import draw
from bench.launch import MODELS, run_worker
from bench.report import describe_machine, table
from bench.ways import OURS, choose, ways_of

#: Charts are drawn of these.
CHARTS = ('save', 'floors', 'hsdp')
SAVES = {'billions': [0.8], 'ranks': [2], 'repeats': 5, 'in_a_row': 3}
FLUSHED = {'ranks': [2, 4], 'ways': ['with fsync, as the hook']}
#: What the options of each benchmark have for their defaults.
BENCHES: dict[str, dict[str, Any]] = {
    'save': {**SAVES, 'ways': ['XTuner', 'Accelerate', 'DCP', OURS]},
    'tensors': {**SAVES, 'billions': [0.01], 'ways': ['XTuner', 'Accelerate', 'DCP', OURS]},
    'floors': {**SAVES, 'ways': ['floor: ', OURS]},
    'hsdp': {**SAVES, 'billions': [0.2], 'ranks': [4], 'ways': [OURS]},
    'throttled': {**SAVES, **FLUSHED, 'repeats': 3, 'in_a_row': 2},
    'memory': {**SAVES, **FLUSHED, 'billions': [0.2, 0.8, 1.6], 'repeats': 1, 'in_a_row': 2},
    'stall': {'billions': [0.8], 'ranks': [2], 'repeats': 5},
    'upload': {'billions': [0.8], 'ranks': [8], 'repeats': 3},
    'start': {'repeats': 3},
    'convert': {'billions': [0.5, 1.5], 'repeats': 5},
    'draw': {},
}
#: The model that trains on one rank beside an upload, and the number of uploads.
BESIDE_UPLOADS = {'what': 'training', 'billions': 0.05, 'repeats': 10}


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=BENCHES, metavar='NAME', help='see above')
    parser.add_argument('--billions', type=float, nargs='+', choices=MODELS, help='billions of parameters of the model')
    parser.add_argument('--ranks', type=int, nargs='+', metavar='N', help='numbers of ranks')
    parser.add_argument('--repeats', type=int, metavar='N', help='measurements per table row')
    parser.add_argument('--in-a-row', type=int, metavar='N', help='consecutive runs, of which only the last one counts')
    parser.add_argument('--ways', nargs='+', metavar='WORDS', help='only rows whose name contains one of these')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/bench'), metavar='DIR', help='for the results')
    args = parser.parse_args()
    defaults = {'what': args.what, 'out': None, **BENCHES[args.what]}
    given = {name: value for name, value in vars(args).items() if value is not None}
    if unknown := given.keys() - defaults.keys():
        parser.error(f'{args.what} has no option {", ".join(unknown)}')
    return Namespace(**{**defaults, **given})


def measure(args: Namespace) -> dict[str, Any]:
    """All cases of a benchmark: each size with each number of ranks."""
    one = convert.measure if args.what == 'convert' else run_ranks
    numbers = getattr(args, 'ranks', [1])
    if args.what == 'start':
        cases = [start.measure(args)]
    else:
        cases = [one(args, n_ranks, billions) for n_ranks in numbers for billions in args.billions]
    return {'date': str(date.today()), 'machine': describe_machine(), 'repeats': args.repeats, 'cases': cases}


def run_ranks(args: Namespace, n_ranks: int, billions: float) -> dict[str, Any]:
    job = {**vars(args), 'billions': billions, 'out': None}
    if 'ways' in job:
        job['ways'] = choose(ways_of(args.what), args.ways)
    case = {'ranks': n_ranks, **run_worker(n_ranks, job, args.out)}
    if args.what == 'upload':
        case['training'] = {'ranks': 1, **run_worker(1, BESIDE_UPLOADS, args.out)}
    return case


def main() -> None:
    args = parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what != 'draw':
        (args.out / f'{args.what}.json').write_text(json.dumps(measure(args), indent=2) + '\n')
    for what in BENCHES if args.what == 'draw' else [args.what]:
        if (file := args.out / f'{what}.json').exists():
            measured = json.loads(file.read_text())
            if what in CHARTS:
                draw(measured, args.out / f'{what}.svg')
            (args.out / f'{what}.md').write_text(table(what, measured))
            print(table(what, measured))


if __name__ == '__main__':
    main()
