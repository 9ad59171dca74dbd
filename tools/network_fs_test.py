#!/usr/bin/env python
"""Save many times on a network file system and count damaged saves; exits with 1 if there are any.

    python tools/network_fs_test.py --saves 200

Two and three hosts with caches of 60 s save into one folder, with all writers, in foreground and background, by calls
and by runs, with one and two saves kept. After each save a host without caches reads all visible folders: they must
match their manifests (checksums, recomputed with zlib) and have, byte for byte, the weights of their step. Needs root,
FUSE, and Debian's moosefs-master, moosefs-chunkserver and moosefs-client.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.moosefs import MooseFS, missing, moosefs
from tests.helpers.network_saves import DOORS, WRITERS, Way, save_in_a_row, scenarios_on_hosts
from tests.helpers.ranks import run_ranks

CACHE_SECS = 60.0
#: Number of saves into one folder.
IN_A_ROW = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--saves', type=int, default=200, help='minimum number of saves (default: %(default)s)')
    parser.add_argument('--folder', type=Path, help="where to put the servers' data (default: a temporary folder)")
    args = parser.parse_args()
    if why := missing():
        print(f'nothing was tested: {why}')
        return 1
    temporary = tempfile.TemporaryDirectory(prefix='network-fs-', dir=args.folder)
    with temporary as folder, moosefs(Path(folder) / 'fs') as fs:
        return _save(fs, args.saves)


def _save(fs: MooseFS, wanted: int) -> int:
    judge = fs.add_host('judge', 0)
    hosts = [fs.add_host(f'host{number}', CACHE_SECS) for number in range(3)]
    counts: Counter[str] = Counter()
    started, done, damaged, turn = time.monotonic(), 0, 0, 0
    while done < wanted:
        n_hosts, max_keep = 2 + turn % 2, 1 + turn // 2 % 2
        turn += 1
        ways = [Way(writer, door, max_keep) for writer in WRITERS for door in DOORS]
        todo = {}
        for way in ways:
            parent = fs.mounted / f'{turn}_{way}'
            judge.sees(parent).mkdir()
            todo[str(way)] = partial(save_in_a_row, way, parent, judge, range(1, IN_A_ROW + 1))
        outcomes = run_ranks(scenarios_on_hosts, n_hosts, hosts[:n_hosts], todo, init=None, timeout_secs=1800)
        for way in ways:
            if error := next((rank[str(way)].error for rank in outcomes if rank[str(way)].error), None):
                print(f'{n_hosts} hosts, {way}: {error}')
                return 1
            seen = outcomes[0][str(way)].value
            bad = [one for one in seen[:-1] if one.damage]
            if seen[-1].leftovers or (seen[-1].damage and not bad):
                bad.append(seen[-1])
            done, damaged = done + IN_A_ROW, damaged + len(bad)
            counts[f'{n_hosts} hosts, {way.writer}'] += IN_A_ROW
            counts[f'{n_hosts} hosts, {way.door}'] += IN_A_ROW
            print(f'{done}/{wanted} {n_hosts} hosts, {way}: {len(bad)} damaged', flush=True)
            for one in bad[:2]:
                print(f'  save {one.number}: {one.damage[:3]}, left over: {one.leftovers}')
    print(f'{done} saves, {damaged} damaged, in {time.monotonic() - started:.0f} s')
    for what, count in sorted(counts.items()):
        print(f'  {what}: {count}')
    return 1 if damaged else 0


if __name__ == '__main__':
    sys.exit(main())
