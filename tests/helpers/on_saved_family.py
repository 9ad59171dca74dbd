"""A command that leaves nothing undone to live on: children of its group, of their own, and none of them hears SIGTERM.

python on_saved_family.py FOLDER SECS: each member writes a file of its process id there; the first ends after SECS.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    folder, secs = Path(sys.argv[1]), float(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    first = os.getpid()
    os.fork()  # each of the two forks again, and some of the four have sessions of their own
    os.fork()
    if os.getpid() % 2 and os.getpid() != first:
        os.setsid()
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)  # the one below has no parent any more
    (folder / f'{os.getpid()}.new').touch()
    (folder / f'{os.getpid()}.new').rename(folder / f'{os.getpid()}.pid')
    time.sleep(secs if os.getpid() == first else 10_000)
    while len(list(folder.glob('*.pid'))) < MEMBERS:
        time.sleep(0.02)


MEMBERS = 8

if __name__ == '__main__':
    main()
