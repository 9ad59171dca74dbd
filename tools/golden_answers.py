#!/usr/bin/env python
"""Compare saves of many models with the answers recorded in tests/golden, or record them.

Run it in an environment with the project, from the root of the repository:

    python tools/golden_answers.py                                  compare all cases
    python tools/golden_answers.py mixtral lora                     those that begin with these words
    python tools/golden_answers.py --transformers 4.48.0            with the overlay .overlay-transformers-4.48.0
    python tools/golden_answers.py --record                         record the answers of this transformers

Answers are by transformers version. tests/unit/exporters/test_golden.py compares those of the installed one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from importlib.metadata import version as version_of
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('cases', nargs='*', metavar='CASE', help='what the names of cases begin with')
    parser.add_argument('--transformers', metavar='VERSION', help='use the overlay with this version')
    parser.add_argument('--record', action='store_true', help='write the answers instead of comparing them')
    args = parser.parse_args()
    if args.transformers:
        overlay = ROOT / f'.overlay-transformers-{args.transformers}'
        if not overlay.exists():
            parser.error(f'no {overlay.name}: source tools/env.sh; make_overlay {overlay.name[9:]} .venv')
        os.environ['PYTHONPATH'] = f'{overlay}:{ROOT}'
        record = ['--record'] if args.record else []
        os.execv(sys.executable, [sys.executable, __file__, *record, *args.cases])
    sys.path.insert(0, str(ROOT))
    return run(tuple(args.cases), args.record)


def run(chosen: tuple[str, ...], is_recorded: bool) -> int:
    import transformers

    from tests.helpers.checks.golden import (
        ANSWERS,
        PACKAGES,
        answer_of,
        differences,
        minor_version,
        read_answers,
        write_answers,
    )
    from tests.helpers.models.golden_cases import OF_XTUNER, cases, save

    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter('ignore')
    began, version = time.monotonic(), minor_version(transformers.__version__)
    everything = read_answers()
    recorded, made, n_different = everything[version], {}, 0
    for name, case in cases():
        if (chosen and not name.startswith(chosen)) or not case.needs():
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                root = Path(folder).resolve()
                made[name] = answer_of(save(case, root), replaced=root, with_bytes=case.is_exact)
            except Exception as error:
                made[name] = {'error': f'{type(error).__name__}: {error}'.replace(folder, 'TMP')}
                print(f'{name}: {made[name]["error"]}', flush=True)
        if not is_recorded:
            lines = differences(made[name], recorded[name]) if name in recorded else ['not recorded']
            n_different += bool(lines)
            for line in lines:
                print(f'{name}: {line}', flush=True)
    if is_recorded:
        if any('error' in answer for answer in made.values()):
            print('nothing was recorded: a save failed')
            return 1
        kept = {name: one for name, one in recorded.items() if chosen or name.startswith(OF_XTUNER)}
        everything[version] = {**kept, **made, PACKAGES: {'peft': minor_version(version_of('peft'))}}
        write_answers(everything)
        print(f'recorded: {len(made)} cases, {ANSWERS.stat().st_size} bytes')
    else:
        for name in sorted(recorded.keys() - made.keys() - {PACKAGES}):
            if not chosen or name.startswith(chosen):
                print(f'{name}: recorded, but not available here')
    secs = time.monotonic() - began
    print(f'transformers {transformers.__version__}: {len(made)} cases, {n_different} differ, {secs:.0f} s')
    return bool(n_different)


if __name__ == '__main__':
    sys.exit(main())
