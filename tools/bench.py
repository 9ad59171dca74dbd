"""Measure xhf_hooks side by side with its peers, in one run, interleaved.

    python tools/bench.py save  [--billions 0.8 1.6] [--repeats 5] [--ranks 2] [--bucket-size 128MB]
                                [--in-a-row 3] [--out DIR]
    python tools/bench.py stall [--billions 0.8] [--repeats 5] [--ranks 2] [--out DIR]
    python tools/bench.py plan  [--ranks 1024] [--out DIR]
    python tools/bench.py ranks [--ranks 2 4 8 16 32] [--repeats 5] [--out DIR]
    python tools/bench.py verify [--billions 0.5] [--repeats 5] [--out DIR]
    python tools/bench.py convert [--billions 0.5 1.5] [--repeats 5] [--out DIR]

save: gloo processes hold a bf16 Llama at ZeRO-3 and save it in each way in turns.
stall: the same, while they iterate: for how long a save stops them, and how fast they are beside one.
plan: the planner alone, for models of hundreds of billions of parameters on many ranks.
ranks: calls of save_hf on 2,000 small tensors by 2 to 32 processes: what agreement costs, stage by stage.
verify: verifying folders, against reading them.
convert: the conversion of a checkpoint, with xtuner's environment (bench/convert.py).

Prints a table of medians; writes DIR/WHAT.json and a chart, DIR/WHAT.svg. Memory is the extra anonymous memory
of the busiest rank, sampled every 2 ms; freed memory is handed back before each run, so that each starts from
the same state. save runs each way three times in a row, and the third counts: a virtual machine gives free memory back
to its host within a second, and new pages from there cost up to 3 us each, so that the same save takes 0.3 to 5 s by
what ran before it. The third run of a way, right after what the second wrote was removed, as a rule finds the memory
that it needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import convert as bench_convert
from bench import verify as bench_verify
from bench.launch import LAYERS, environment, torchrun
from bench.plan import measure_plans
from bench.ranks import measure_ranks
from bench.report import describe_machine, draw, table

from xhf_hooks.config.checks import parse_size

WORKER = Path(__file__).with_name('bench') / 'worker.py'


def run_worker(what: str, billions: float, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One launch, one model size, all ways."""
    result = folder / 'result.json'
    command = [*torchrun(args.ranks), str(WORKER), what, '--billions', str(billions), '--repeats', str(args.repeats)]
    command += ['--bucket-size', str(parse_size(args.bucket_size))]
    if what == 'save':
        command += ['--in-a-row', str(args.in_a_row)]
    command += ['--folder', str(folder / 'saves'), '--result', str(result)]
    finished = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f'{" ".join(command)} failed:\n{finished.stdout[-6000:]}\n{finished.stderr[-6000:]}')
    return json.loads(result.read_text())


def measure_saves(args: argparse.Namespace) -> dict[str, Any]:
    """``save`` and ``stall``."""
    measured: dict[str, Any] = {'machine': describe_machine(), 'ranks': args.ranks, 'repeats': args.repeats}
    measured['sizes'] = []
    for billions in args.billions:
        print(f'{billions} B parameters, {args.ranks} ranks, {args.repeats} repeats ...', file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=args.out) as folder:
            measured['sizes'].append(run_worker(args.what, billions, args, Path(folder)))
    return measured


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='what', required=True)
    for what, sizes in (('save', [0.8, 1.6]), ('stall', [0.8])):
        command = commands.add_parser(what)
        command.add_argument('--billions', type=float, nargs='+', default=sizes, choices=list(LAYERS))
        command.add_argument('--repeats', type=int, default=5)
        command.add_argument('--ranks', type=int, default=2)
        command.add_argument('--bucket-size', default='128MB')
        if what == 'save':
            command.add_argument('--in-a-row', type=int, default=3, help='runs of a way, of which the last counts')
    commands.add_parser('plan').add_argument('--ranks', type=int, default=1024)
    ranks = commands.add_parser('ranks')
    ranks.add_argument('--ranks', type=int, nargs='+', default=[2, 4, 8, 16, 32])
    ranks.add_argument('--repeats', type=int, default=5)
    verify = commands.add_parser('verify')
    verify.add_argument('--billions', type=float, default=0.5, choices=list(bench_verify.LAYERS))
    verify.add_argument('--repeats', type=int, default=5)
    convert = commands.add_parser('convert')
    convert.add_argument('--billions', type=float, nargs='+', default=[0.5, 1.5], choices=list(bench_convert.SIZES))
    convert.add_argument('--repeats', type=int, default=5)
    for command in commands.choices.values():
        command.add_argument('--out', type=Path, default=Path('work_dirs/bench'))
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == 'convert':
        measured = {'machine': describe_machine(), **bench_convert.measure_all(args.billions, args.repeats, args.out)}
    elif args.what == 'verify':
        measured = bench_verify.measure_verify(args.billions, args.repeats, args.out)
        measured = {'machine': describe_machine(), **measured}
    elif args.what == 'plan':
        measured = {'machine': describe_machine(), 'ranks': args.ranks, 'plans': measure_plans(args.ranks)}
    elif args.what == 'ranks':
        measured = {'machine': describe_machine(), 'runs': measure_ranks(args.ranks, args.repeats, args.out)}
    else:
        measured = measure_saves(args)
    (args.out / f'{args.what}.json').write_text(json.dumps(measured, indent=2) + '\n')
    draw(args.what, measured, args.out / f'{args.what}.svg')
    print(table(args.what, measured))


if __name__ == '__main__':
    main()
