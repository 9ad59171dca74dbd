"""Measures xhf_hooks side by side with its peers: ``python tools/bench.py NAME``; ``--help`` lists the benchmarks.

Memory is the extra anonymous memory of the busiest rank, sampled every 2 ms. Freed memory is returned before each run,
so that all runs start from the same state. Bytes sent are counted by the kernel, on each rank's own TCP connections.

``save`` runs each way three times in a row, and only the third run counts: a virtual machine returns free memory to its
host within a second, and new pages from there cost up to 3 us each. So the same save takes 0.3 to 5 s, depending on
what ran before it. The third run starts right after the files of the second were removed, so it usually finds the
memory that it needs.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# For what bench shares with tests/helpers
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import convert, saves, stores
from bench.charts import draw
from bench.report import describe_machine, table

from xhf_hooks.cli.output import CommandParser

_EXAMPLES = {
    'save': 'compare the time and memory of a save with all peers',
    'save --billions 0.8 1.6 --ways stream floor': 'two model sizes; only rows with these words in their name',
    'stall --repeats 3 --out DIR': 'measure how long saves stop training; write the results to DIR',
    'draw --out docs/bench': 'measure nothing; make tables and charts again from the JSON files there',
}
_EPILOG = """\
A benchmark prints its progress, and at the end a table of medians. It writes the table, a chart and the JSON behind
them to DIR/NAME.md, DIR/NAME.svg and DIR/NAME.json. docs/performance.md explains the results."""


@dataclass(frozen=True)
class Bench:
    """One benchmark.

    Attributes:
        meaning: What it measures, in one line.
        add_options: Adds its options to its command.
        measure: Returns the content of WHAT.json, except the machine.
    """

    meaning: str
    add_options: Callable[[ArgumentParser], None]
    measure: Callable[[Namespace], dict[str, Any]]


#: A new benchmark needs an entry here, a table in report.py and a chart in charts.py.
BENCHES = {
    'save': Bench(
        'saves of a ZeRO-3 model, with every writer and every peer',
        saves.add_save_options,
        saves.measure_save,
    ),
    'floors': Bench(
        'saves with every writer, compared with how fast disk and loopback can move as many bytes',
        saves.add_floors_options,
        saves.measure_save,
    ),
    'throttled': Bench(
        'saves with every writer and a limited bandwidth from each rank to the disk',
        saves.add_throttled_options,
        saves.measure_throttled,
    ),
    'memory': Bench(
        'memory and network traffic of every writer',
        saves.add_memory_options,
        saves.measure_memory,
    ),
    'stall': Bench(
        'how long a save stops training, and how much it slows training down',
        saves.add_stall_options,
        saves.measure_stall,
    ),
    'upload': Bench(
        'uploads to an object store by all ranks, compared with rank 0 alone',
        stores.add_upload_options,
        stores.measure_upload,
    ),
    'out_dir': Bench(
        'saves to an object store without a disk, compared with an upload by rank 0',
        stores.add_out_dir_options,
        stores.measure_out_dir,
    ),
    'convert': Bench(
        "conversion of a checkpoint, compared with other converters; needs XTuner's environment",
        convert.add_options,
        convert.measure,
    ),
}


def make_parser() -> ArgumentParser:
    parser = CommandParser(
        prog='python tools/bench.py',
        examples=_EXAMPLES,
        description='Measure xhf_hooks side by side with its peers.',
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest='what', required=True, metavar='NAME', parser_class=ArgumentParser)
    for what, bench in BENCHES.items():
        bench.add_options(_add_command(commands, what, bench.meaning))
    _add_command(commands, 'draw', 'measure nothing; make tables and charts again from DIR/NAME.json')
    for command in commands.choices.values():
        command.add_argument(
            '--out',
            type=lambda text: Path(text).absolute(),
            default=Path('work_dirs/bench').absolute(),
            metavar='DIR',
            help='folder for the results (default: work_dirs/bench)',
        )
    return parser


def _add_command(commands: Any, what: str, meaning: str) -> ArgumentParser:
    return commands.add_parser(what, help=meaning, description=f'{meaning[0].upper()}{meaning[1:]}.')


def run(what: str, args: Namespace) -> None:
    """Run a benchmark; write JSON, chart and table."""
    measured = {'machine': describe_machine(), **BENCHES[what].measure(args)}
    (args.out / f'{what}.json').write_text(json.dumps(measured, indent=2) + '\n')
    show(what, measured, args.out)


def show(what: str, measured: dict[str, Any], out: Path) -> None:
    """Draw the chart, write and print the table."""
    draw(what, measured, out / f'{what}.svg')
    (out / f'{what}.md').write_text(table(what, measured))
    print(table(what, measured))


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == 'draw':
        for what in BENCHES:
            if (file := args.out / f'{what}.json').exists():
                show(what, json.loads(file.read_text()), args.out)
    else:
        run(args.what, args)


if __name__ == '__main__':
    main()
