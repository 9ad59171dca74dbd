#!/usr/bin/env python
"""Kill runs during saves many times and count lost saves; exits with 1 if there are any.

    python tools/kill_test.py --kills 200

Runs of two processes save continuously, with all writers, in foreground and background, with and without ZeRO-3. One or
all processes are ended at random times with SIGKILL or SIGTERM. Afterwards every visible folder must be complete (by
the manifest's checksums, recomputed with zlib) and of one save, no committed save may be missing, and the next run must
remove the leftovers and save.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.assert_intact import hidden
from tests.helpers.kill_runs import KINDS, NAME, live_and_die, next_start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--kills', type=int, default=200, help='number of runs to kill (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='seed of the random instants (default: %(default)s)')
    parser.add_argument('--folder', type=Path, help='where to put the saves (default: a temporary folder)')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix='kills-', dir=args.folder) as folder:
        return _kill(Path(folder) / 'run', args.kills, random.Random(args.seed))


def _kill(parent: Path, kills: int, dice: random.Random) -> int:
    parent.mkdir()
    counts: Counter[str] = Counter()
    newest = 0
    started = time.monotonic()
    for number in range(kills):
        kind, max_keep = KINDS[number % len(KINDS)], 1 + number // len(KINDS) % 3
        try:
            death = live_and_die(parent, kind, newest + 1, dice, max_keep)
            counts['in the middle of a save'] += death.began > death.committed
            counts['with leftovers'] += bool(hidden(parent))
            found = next_start(parent, max_keep)
            if kind.signal is signal.SIGTERM and kind.victims == 'all':
                assert found.get(NAME, 0) >= death.copied, f'save {death.copied} was not finished'
        except AssertionError as error:
            print(f'kill {number + 1}, {kind}: {error}')
            return 1
        if newest and NAME not in found:
            print(f'kill {number + 1}, {kind}: the newest save is gone')
            return 1
        newest = max(newest, found.get(NAME, 0), death.began)
        counts[f'{kind.signal.name} to {kind.victims}'] += 1
        counts['survivors with an error of ours'] += sum('not ours' not in text for text in death.survivors)
        counts['survivors with another error'] += sum('not ours' in text for text in death.survivors)
        print(
            f'{number + 1}/{kills} {kind}: began {death.began}, committed {death.committed}, found {found}', flush=True
        )
    print(f'{kills} runs killed in {time.monotonic() - started:.0f} s, {newest} saves begun, 0 lost, 0 partial')
    for what, count in sorted(counts.items()):
        print(f'  {what}: {count}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
