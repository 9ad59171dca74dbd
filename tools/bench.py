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


#: What adds the options of a benchmark, and what measures it, whose docstring is its help. A new one also needs a table
#: in report.py and a chart in charts.py.
BENCHES: dict[str, tuple[Callable[[ArgumentParser], None], Callable[[Namespace], dict[str, Any]]]] = {
    'save': (saves.add_save_options, saves.measure_save),
    'floors': (saves.add_floors_options, saves.measure_floors),
    'hsdp': (saves.add_hsdp_options, saves.measure_hsdp),
    'throttled': (saves.add_throttled_options, saves.measure_throttled),
    'memory': (saves.add_memory_options, saves.measure_memory),
    'stall': (saves.add_stall_options, saves.measure_stall),
    'upload': (stores.add_upload_options, stores.measure_upload),
    'convert': (convert.add_options, convert.measure),
}


def make_parser() -> ArgumentParser:
    parser = CommandParser(
        prog='python tools/bench.py',
        examples=_EXAMPLES,
        description='Measure xhf_hooks side by side with its peers.',
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest='what', required=True, metavar='NAME', parser_class=ArgumentParser)
    for what, (add_options, measure) in BENCHES.items():
        add_options(_add_command(commands, what, measure.__doc__))
    _add_command(commands, 'draw', 'Measure nothing; make tables and charts again from DIR/NAME.json.')
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
    return commands.add_parser(what, help=meaning.removesuffix('.'), description=meaning)


def run(what: str, args: Namespace) -> None:
    """Run a benchmark; write JSON, chart and table."""
    measured = {'machine': describe_machine(), **BENCHES[what][1](args)}
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
