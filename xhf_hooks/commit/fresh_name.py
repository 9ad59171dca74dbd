"""What a name stands for on the server, whatever this client of a network file system has cached.

Clients cache names for up to a minute (NFS: acdirmax; MooseFS: mfsdirentrycacheto; every FUSE client: entry_timeout). A
name that another host has renamed or replaced since leads to the old folder, and deleting it would delete that one. So
rank 0 asks the server before it acts on a name that another host may have made.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def look_up(path: Path) -> os.stat_result | None:
    """``lstat`` of a name on the server; None where there is nothing. Runs on: rank 0.

    Creating a name makes the client ask the server and refresh its cache (Linux: LOOKUP_EXCL in fuse_dentry_revalidate,
    fs/fuse/dir.c, and in nfs_do_lookup_revalidate, fs/nfs/dir.c). A hard link to a folder is created for that: every
    system refuses it, but only after the refresh.

    A name that the client has cached as absent may exist; then the server refuses the rename that follows.

    Raises:
        OSError: The folder that it is in cannot be read.
    """
    with contextlib.suppress(OSError):
        os.link(path.parent, path)
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None
