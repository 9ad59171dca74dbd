"""Measure a save, or a conversion, side by side with its peers, in one run, interleaved.

    python tools/bench.py save [--billions 0.8 1.6] [--repeats 5] [--bucket-size 128MB] [--out DIR]
    python tools/bench.py convert [--billions 0.5 1.5] [--repeats 5] [--out DIR]

For convert see bench_convert.py. For save, two gloo processes hold a bf16 Llama at ZeRO-3 and save it in each way
in turns. Prints a table of medians and writes DIR/save.json. Memory is the extra anonymous memory of the busiest
rank, sampled every 2 ms; freed memory is handed back before each run, so that each starts from the same state.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench_convert

from xhf_hooks.plan import parse_size

WORKER = Path(__file__).with_name('bench_worker.py')
WORLD_SIZE = 2


def run_worker(billions: float, repeats: int, bucket_nbytes: int, folder: Path) -> dict[str, Any]:
    """One launch, one model size, all ways."""
    result = folder / 'result.json'
    command = ['torchrun', '--standalone', '--local-addr', 'localhost', '--nproc_per_node', str(WORLD_SIZE)]
    command += [str(WORKER), '--billions', str(billions), '--repeats', str(repeats)]
    command += ['--bucket-size', str(bucket_nbytes), '--folder', str(folder / 'saves'), '--result', str(result)]
    environment = {**os.environ, 'DS_ACCELERATOR': 'cpu', 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1'}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f'{" ".join(command)} failed:\n{finished.stdout[-3000:]}\n{finished.stderr[-3000:]}')
    return json.loads(result.read_text())


def medians(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Median of each figure of each way."""
    return {
        way: {key: statistics.median(run[key] for run in repeated) for key in repeated[0]}
        for way, repeated in runs.items()
    }


def table(measured: dict[str, Any]) -> str:
    """Markdown: seconds, ratio to XTuner's hook, ratio to the floor, extra memory."""
    from bench_worker import FLOOR, XTUNER  # not at the top: it imports deepspeed, which prints

    lines = []
    for size in measured['sizes']:
        found = medians(size['runs'])
        lines += [
            f'{size["parameters"] / 1e9:.2f} B parameters, {size["nbytes"] / 1e9:.2f} GB:',
            '',
            "| way | seconds | times faster than XTuner's hook | times the floor | extra memory, MB |",
            '|---|---|---|---|---|',
        ]
        for way, figures in found.items():
            faster = found[XTUNER]['seconds'] / figures['seconds']
            floors = figures['seconds'] / found[FLOOR]['seconds']
            lines.append(
                f'| {way} | {figures["seconds"]:.2f} | {faster:.1f} | {floors:.1f} | {figures["peak_extra_mb"]:.0f} |'
            )
        lines.append('')
    return '\n'.join(lines)


def describe_machine() -> dict[str, Any]:
    model = next((line for line in Path('/proc/cpuinfo').read_text().splitlines() if 'model name' in line), '')
    return {
        'cpu': model.partition(':')[2].strip() or platform.machine(),
        'cores': os.cpu_count(),
        'load': os.getloadavg()[0],
        'python': platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest='command', metavar='save|convert')
    save = commands.add_parser('save', help='a save against its peers')
    save.add_argument('--billions', type=float, nargs='+', default=[0.8, 1.6], choices=[0.8, 1.6])
    save.add_argument('--bucket-size', default='128MB')
    convert = commands.add_parser('convert', help='a conversion against its peers')
    convert.add_argument('--billions', type=float, nargs='+', default=[0.5, 1.5], choices=[0.01, 0.5, 1.5])
    for command in (save, convert):
        command.add_argument('--repeats', type=int, default=5)
        command.add_argument('--out', type=Path, default=Path('work_dirs/bench'))
    args = parser.parse_args()

    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    measured: dict[str, Any] = {'machine': describe_machine(), 'repeats': args.repeats, 'sizes': []}
    for billions in args.billions:
        print(f'{billions} B parameters, {args.repeats} repeats ...', file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=args.out) as folder:
            if args.command == 'convert':
                size = bench_convert.run(billions, args.repeats, Path(folder))
            else:
                size = run_worker(billions, args.repeats, parse_size(args.bucket_size), Path(folder))
        measured['sizes'].append(size)
    (args.out / f'{args.command}.json').write_text(json.dumps(measured, indent=2) + '\n')
    print(table(measured) if args.command == 'save' else bench_convert.table(measured))


if __name__ == '__main__':
    main()
