"""A command that tries hard to survive: children and orphans, all ignoring SIGTERM.

python on_saved_family.py FOLDER SECS: each process writes a file with its id there; the first ends after SECS seconds.
"""

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
    os.fork()  # both processes fork again
    os.fork()
    if not os.fork() and os.fork():
        os._exit(0)  # its child has no parent then
    (folder / f'{os.getpid()}.new').touch()
    (folder / f'{os.getpid()}.new').rename(folder / f'{os.getpid()}.pid')
    time.sleep(secs if os.getpid() == first else 10_000)
    while len(list(folder.glob('*.pid'))) < MEMBERS:
        time.sleep(0.02)


MEMBERS = 8

if __name__ == '__main__':
    main()
