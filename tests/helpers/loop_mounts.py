"""Small disks with several kinds of file systems, visible only to processes that enter.

They are mounted in a separate namespace, so nothing is left behind, however the test run ends. Needs root, loop
devices, and Debian's xfsprogs and btrfs-progs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.namespaces import enter
from tests.helpers.processes import started, wait_until

PACKAGES = ('xfsprogs', 'btrfs-progs')
#: Kinds and approximate sizes, the minimum for XFS and Btrfs.
KINDS = {'ext4': 64 * 2**20, 'xfs': 320 * 2**20, 'btrfs': 128 * 2**20, 'tmpfs': 64 * 2**20}
_MOUNT = """
cd "$1"
for kind in ext4 xfs btrfs tmpfs; do
    mkdir $kind
done
mkfs.ext4 -q ext4.disk && mount -o loop ext4.disk ext4
mkfs.xfs -q xfs.disk && mount -o loop xfs.disk xfs
mkfs.btrfs -q btrfs.disk && mount -o loop btrfs.disk btrfs
mount -t tmpfs -o size=64m tmpfs tmpfs
touch done
exec sleep infinity
"""


@dataclass(frozen=True)
class Disks:
    """Where the file systems are. Picklable.

    Attributes:
        pid: The process that keeps the namespace alive.
        root: A folder with one folder for each kind.
        missing: Kind to the reason why it is missing.
    """

    pid: int
    root: Path
    missing: dict[str, str] = field(default_factory=dict)

    def enter(self) -> None:
        """Make them visible to this process, which must not have threads yet. Runs on: a rank."""
        enter(self.pid, 'mnt')

    def sees(self, path: Path) -> Path:
        """The path by which any process on this machine can access ``path``."""
        return Path('/proc', str(self.pid), 'root', path.relative_to('/'))


@contextlib.contextmanager
def loop_mounts(folder: Path) -> Iterator[Disks]:
    """Make and mount them all.

    Args:
        folder: An empty folder with 0.5 GB free, of which little is used.
    """
    if os.geteuid() != 0:
        yield Disks(os.getpid(), folder, dict.fromkeys(KINDS, 'only root can mount it'))
        return
    log = folder / 'log'
    for kind, nbytes in KINDS.items():
        with (folder / f'{kind}.disk').open('wb') as disk:
            disk.truncate(nbytes)
    shell = ['unshare', '--mount', '--propagation', 'private', 'sh', '-c', _MOUNT, 'sh', folder]
    with started(shell, log) as process:
        wait_until((folder / 'done').exists, process, log, 'all file systems were mounted')
        mounts = Path(f'/proc/{process.pid}/mountinfo').read_text()
        why = ' '.join(log.read_text(errors='replace').split())
        absent = {kind: why for kind in KINDS if f' {folder / kind} ' not in mounts}
        yield Disks(process.pid, folder, absent)
