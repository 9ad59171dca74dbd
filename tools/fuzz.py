#!/usr/bin/env python
"""Fuzz xhf-convert and xhf-verify with mutants of small checkpoints and model folders.

    python tools/fuzz.py convert --mutants 10000
    python tools/fuzz.py verify --mutants 10000
    python tools/fuzz.py convert --only 1234        # repeat one mutant in this process, with its traceback

Each mutant runs in a child process with limits on CPU time and memory. The command must refuse it in one line, or
give the same weights as torch, safetensors and transformers. Exits with 1 otherwise. Mutants are determined by seed and
number.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ENVIRONMENT = {
    'HF_HUB_OFFLINE': '1',
    'TOKENIZERS_PARALLELISM': 'false',
    'OMP_NUM_THREADS': '1',
    'CUDA_VISIBLE_DEVICES': '',
}
os.environ.update(ENVIRONMENT)  # before torch and transformers are imported

from tests.helpers.fuzz_cases import TOOLS, Case, make_case, make_templates  # noqa: E402
from tests.helpers.fuzz_judges import fault, outcome  # noqa: E402
from tests.helpers.limited_run import Limits, Measured, Run  # noqa: E402

_TELL_EVERY_SECS = 30.0
_OUTPUT = ('out_text', 'err')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('tool', choices=TOOLS, help='the command to fuzz')
    parser.add_argument('--mutants', type=int, default=10_000, help='number of mutants (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='seed of the mutants (default: %(default)s)')
    parser.add_argument(
        '--first', type=int, default=0, metavar='NUMBER', help='number of the first mutant (default: %(default)s)'
    )
    parser.add_argument('--only', type=int, metavar='NUMBER', help='run only this mutant, in this process')
    parser.add_argument(
        '--jobs', type=int, default=len(os.sched_getaffinity(0)), help='mutants at a time (default: number of cores)'
    )
    parser.add_argument('--folder', type=Path, help='where to put the files (default: a temporary folder)')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix='xhf-fuzz-', dir=args.folder, ignore_cleanup_errors=True) as temporary:
        fuzzer = Fuzzer(args.tool, args.seed, Path(temporary))
        if args.only is not None:
            return fuzzer.repeat(args.only)
        return fuzzer.run(range(args.first, args.first + args.mutants), args.jobs)


@dataclass
class Fuzzer:
    """Makes cases, runs them and counts outcomes."""

    tool: str
    seed: int
    folder: Path
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self._root = self.folder / 'templates'
        import tqdm
        import transformers

        transformers.logging.get_logger()  # it keeps the current standard error
        tqdm.tqdm.monitor_interval = 0  # prevents a thread
        with _silent():
            make_templates(self.tool, self._root)
        self._outcomes: Counter[str] = Counter()
        self._faults: dict[str, list[Case]] = {}
        self._slowest, self._largest = (0.0, -1), (0, -1)

    def repeat(self, number: int) -> int:
        """Run one case in this process; its folder is kept for inspection."""
        folder = Path(tempfile.mkdtemp(prefix=f'xhf-fuzz-{self.tool}-{number}-'))
        case = make_case(self.tool, self.seed, number, self._root, folder)
        print(
            f'{number}: {case.template}, {case.what}\ncd {folder} && xhf-{self.tool} {" ".join(case.argv)}', flush=True
        )
        os.chdir(folder)
        status = _command(self.tool)(list(case.argv))
        print(f'exit status {status}')
        return status

    def run(self, numbers: range, jobs: int) -> int:
        """Run all cases, several at a time; returns 1 if any failed."""
        self._warm_up()
        started = told = time.monotonic()
        waiting, done = iter(numbers), 0
        running: list[tuple[int, Path, Run]] = []
        try:
            while True:
                running += [self._start(number) for number in islice(waiting, jobs - len(running))]
                if not running:
                    return self._summarize(done, time.monotonic() - started)
                time.sleep(0.01)
                for entry in list(running):
                    number, folder, run = entry
                    if (measured := run.poll()) is not None:
                        running.remove(entry)
                        done += 1
                        self._count(number, folder, measured)
                if time.monotonic() - told > _TELL_EVERY_SECS:
                    told = time.monotonic()
                    print(f'{done} of {len(numbers)} in {told - started:.0f} s: {self._counts()}', flush=True)
        finally:
            for _, _, run in running:
                run.stop()

    def _warm_up(self) -> None:
        """Import once what every case needs. No thread may remain, since forks do not inherit threads."""
        import torch

        torch.set_num_threads(1)
        here = os.getcwd()
        for name in sorted(path.name for path in self._root.iterdir()):
            folder = Path(shutil.copytree(self._root / name, self.folder / f'warm-{name}'))
            os.chdir(folder)
            given = _UNSPOILED[self.tool](name)
            command = partial(_command(self.tool), given)
            run = Run(lambda: None, lambda _: command(), lambda *_: '', _outputs(folder), self.limits)  # noqa: B023
            while (measured := run.poll()) is None:
                time.sleep(0.01)
            if measured.status != 0:
                raise SystemExit(f'the unspoiled {name} is not accepted:\n{(folder / "err").read_text()}')
            shutil.rmtree(folder / 'out', ignore_errors=True)
            with _silent():
                command()
        import tests.helpers.fuzz_weights  # noqa: F401

        os.chdir(here)
        gc.collect()
        gc.freeze()
        if threading.active_count() > 1:
            raise SystemExit(f'threads are left: {threading.enumerate()}')

    def _start(self, number: int) -> tuple[int, Path, Run]:
        from tests.helpers.fuzz_weights import judge

        folder = self.folder / f'case-{number}'
        folder.mkdir()

        def prepare() -> Case:
            case = make_case(self.tool, self.seed, number, self._root, folder / 'files')
            os.chdir(folder / 'files')
            return case

        def work(case: Case) -> int:
            return _command(self.tool)(list(case.argv))

        def verdict(case: Case, status: int) -> str:
            return judge(case, status, self._root, folder / 'files')

        return number, folder, Run(prepare, work, verdict, _outputs(folder), self.limits)

    def _count(self, number: int, folder: Path, measured: Measured) -> None:
        case = measured.about
        if case is None:
            raise SystemExit(f'mutant {number} could not be made: {measured.ended_by}')
        wrong = fault(case, measured, *_outputs(folder))
        self._outcomes['FAILED' if wrong else outcome(measured)] += 1
        self._slowest = max(self._slowest, (measured.cpu_secs, number))
        self._largest = max(self._largest, (measured.extra_nbytes, number))
        if wrong:
            cases = self._faults.setdefault(wrong, [])
            cases.append(case)
            if len(cases) <= 3:
                print(f'mutant {number} ({case.template}, {case.what}): {wrong} [{_cost(measured)}]', flush=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _counts(self) -> str:
        return ', '.join(f'{count} {name}' for name, count in sorted(self._outcomes.items()))

    def _summarize(self, done: int, seconds: float) -> int:
        print(f'{done} mutants in {seconds:.0f} s: {self._counts()}')
        secs, slow = self._slowest
        nbytes, large = self._largest
        print(f'at most {secs:.1f} s of CPU (mutant {slow}) and {nbytes / 1e6:.0f} MB (mutant {large})')
        for wrong, cases in sorted(self._faults.items(), key=lambda item: -len(item[1])):
            numbers = ', '.join(str(case.number) for case in cases[:5])
            print(f'{len(cases)} x {wrong}\n    {cases[0].template}, {cases[0].what}; mutants {numbers}')
        if self._faults:
            seed = f' --seed {self.seed}' if self.seed else ''
            print(f'again: python tools/fuzz.py {self.tool}{seed} --only NUMBER')
        return 1 if self._faults else 0


@contextmanager
def _silent() -> Iterator[None]:
    with open(os.devnull, 'w') as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _cost(measured: Measured) -> str:
    return f'{measured.cpu_secs:.1f} s, {measured.extra_nbytes / 1e6:.0f} MB'


def _outputs(folder: Path) -> tuple[Path, Path]:
    return folder / _OUTPUT[0], folder / _OUTPUT[1]


def _command(tool: str):
    if tool == 'convert':
        from xhf_hooks.cli.convert import main as command
    else:
        from xhf_hooks.cli.verify import main as command
    return command


def _given(name: str) -> list[str]:
    from tests.helpers.fuzz_templates import CHECKPOINTS

    return [CHECKPOINTS[name], 'out', '--workers', '2']


_UNSPOILED = {'convert': _given, 'verify': lambda name: ['model', '--workers', '2']}

if __name__ == '__main__':
    sys.exit(main())
