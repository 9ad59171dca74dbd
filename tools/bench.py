"""Measure xhf_hooks side by side with its peers, in one run, interleaved.

    python tools/bench.py save  [--billions 0.8 1.6] [--ways stream floor] [--repeats 5] [--ranks 2]
                                [--bucket-size 128MB] [--in-a-row 3] [--out DIR]
    python tools/bench.py throttled [--ranks 2 4] [--billions 0.8] [--repeats 3] [--out DIR]
    python tools/bench.py memory [--ranks 2 4] [--billions 0.2 0.8 1.6] [--out DIR]
    python tools/bench.py stall [--billions 0.8] [--repeats 5] [--ranks 2] [--out DIR]
    python tools/bench.py plan  [--ranks 1024] [--out DIR]
    python tools/bench.py ranks [--ranks 2 4 8 16 32] [--repeats 5] [--out DIR]
    python tools/bench.py verify [--billions 0.5] [--repeats 5] [--out DIR]
    python tools/bench.py upload [--ranks 8] [--megabytes 640] [--uplink 40] [--repeats 5] [--training-ranks 1]
                                [--training-uplink 10] [--out DIR]
    python tools/bench.py out_dir [--ranks 8] [--billions 0.8] [--uplink 40] [--repeats 3] [--out DIR]
    python tools/bench.py convert [--billions 0.5 1.5] [--repeats 5] [--out DIR]
    python tools/bench.py all --out docs/bench
    python tools/bench.py draw --out docs/bench

save: gloo processes hold a bf16 Llama at ZeRO-3 and save it in each way in turns; and what disk and loopback allow.
throttled: each writer, where no rank can write faster than a share lets one client.
memory: what each writer takes of memory and network, by size of the model and number of ranks.
stall: for how long a save stops training, how fast training is beside one, and what it takes of the page cache.
plan: the planner alone, for models of hundreds of billions of parameters on many ranks.
ranks: calls of save_hf on 2,000 small tensors by 2 to 32 processes: what agreement costs, stage by stage.
verify: verifying folders, against reading them.
upload: a save to an object store, by all ranks and by rank 0 alone, each rank's uplink throttled; what of training an
    upload takes.
out_dir: the same without a disk, against gathering, saving and uploading on rank 0.
convert: the conversion of a checkpoint, with xtuner's environment (bench/convert.py).
all: one after the other, as by default, all that README and docs quote.
draw: nothing is measured; tables and charts of what lies in DIR.

Says first about how long it will take, then what is left. Prints a table of medians; writes it, the JSON behind it and
a chart to DIR/WHAT.md, WHAT.json and WHAT.svg. Memory is the extra anonymous memory of the busiest rank, sampled every
2 ms; freed memory is handed back before each run, so that each starts from the same state. What is sent is counted by
the kernel, at each rank's own TCP connections. save runs each way three times in a row, and the third counts: a
virtual machine gives free memory back to its host within a second, and new pages from there cost up to 3 us each, so
that the same save takes 0.3 to 5 s by what ran before it. The third run of a way, right after what the second wrote
was removed, as a rule finds the memory that it needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# For what bench shares with tests/helpers
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import convert, out_dir, plan, ranks, saves, upload, verify
from bench.charts import chart_of
from bench.progress import time_words
from bench.report import describe_machine, table
from bench.svg import svg

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Bench:
    """One benchmark.

    Attributes:
        add_options: Adds its options to its command.
        expected_secs: Estimates its duration from the options.
        measure: Returns the content of WHAT.json, except the machine.
        stack: The environment that it needs.
        is_quoted: Whether README and docs quote it.
    """

    add_options: Callable[[ArgumentParser], None]
    expected_secs: Callable[[Namespace], float]
    measure: Callable[[Namespace], dict[str, Any]]
    stack: str = 'modern'
    is_quoted: bool = True


#: In the order of ``all``. A new benchmark needs a line here, a table in report.py and a chart in charts.py.
BENCHES = {
    'save': Bench(saves.add_save_options, saves.save_secs, saves.measure_save),
    'throttled': Bench(saves.add_throttled_options, saves.throttled_secs, saves.measure_throttled),
    'memory': Bench(saves.add_memory_options, saves.memory_secs, saves.measure_memory),
    'stall': Bench(saves.add_stall_options, saves.stall_secs, saves.measure_stall),
    'plan': Bench(plan.add_options, plan.expected_secs, plan.measure),
    'ranks': Bench(ranks.add_options, ranks.expected_secs, ranks.measure, is_quoted=False),
    'verify': Bench(verify.add_options, verify.expected_secs, verify.measure),
    'upload': Bench(upload.add_options, upload.expected_secs, upload.measure),
    'out_dir': Bench(out_dir.add_options, out_dir.expected_secs, out_dir.measure, is_quoted=False),
    'convert': Bench(convert.add_options, convert.expected_secs, convert.measure, stack='xtuner'),
}


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='what', required=True)
    for what, bench in BENCHES.items():
        bench.add_options(commands.add_parser(what))
    everything = commands.add_parser('all')
    everything.add_argument('--xtuner-env', type=Path, default=Path('.venv-xtuner'), help='for convert')
    commands.add_parser('draw')
    for command in commands.choices.values():
        command.add_argument(
            '--out', type=lambda text: Path(text).absolute(), default=Path('work_dirs/bench').absolute()
        )
    return parser


def run(what: str, args: Namespace) -> None:
    """Run a benchmark; write JSON, chart and table."""
    bench = BENCHES[what]
    print(f'{what}: {time_words(bench.expected_secs(args))}', file=sys.stderr, flush=True)
    measured = {'machine': describe_machine(), **bench.measure(args)}
    (args.out / f'{what}.json').write_text(json.dumps(measured, indent=2) + '\n')
    show(what, measured, args.out)


def show(what: str, measured: dict[str, Any], out: Path) -> None:
    """Draw the chart, write and print the table."""
    (out / f'{what}.svg').write_text(svg(chart_of(what, measured)))
    (out / f'{what}.md').write_text(table(what, measured))
    print(table(what, measured))


def run_all(args: Namespace, parser: ArgumentParser) -> None:
    """Run each benchmark in a separate process, since ``convert`` needs another environment."""
    pythons = {'modern': sys.executable, 'xtuner': str(args.xtuner_env.absolute() / 'bin' / 'python')}
    if not Path(pythons['xtuner']).exists():
        sys.exit(f'{pythons["xtuner"]} is not there; name the environment that has xtuner with --xtuner-env')
    quoted = {what: bench for what, bench in BENCHES.items() if bench.is_quoted}
    expected = {what: bench.expected_secs(parser.parse_args([what])) for what, bench in quoted.items()}
    shares = ', '.join(f'{what} {seconds / 60:.0f}' for what, seconds in expected.items())
    print(f'all: {time_words(sum(expected.values()))} ({shares} min)', file=sys.stderr, flush=True)
    for what, bench in quoted.items():
        subprocess.run([pythons[bench.stack], __file__, what, '--out', str(args.out)], cwd=ROOT, check=True)


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == 'all':
        run_all(args, parser)
    elif args.what == 'draw':
        for what in BENCHES:
            if (file := args.out / f'{what}.json').exists():
                show(what, json.loads(file.read_text()), args.out)
    else:
        run(args.what, args)


if __name__ == '__main__':
    main()
