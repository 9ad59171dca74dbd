"""Asks the server of a network file system what a name refers to, bypassing this client's cache.

Clients cache names for up to a minute (NFS: acdirmax; MooseFS: mfsdirentrycacheto; every FUSE client: entry_timeout).
If another host has since renamed or replaced a folder, its name still leads to the old one here, and deleting it would
delete the wrong folder. So rank 0 asks the server before it acts on a name that another host may have made.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def look_up(path: Path) -> os.stat_result | None:
    """``lstat`` of a name on the server; None if it does not exist. Runs on: rank 0.

    Creating a name makes the client ask the server and refresh its cache (Linux: LOOKUP_EXCL in fuse_dentry_revalidate,
    fs/fuse/dir.c, and in nfs_do_lookup_revalidate, fs/nfs/dir.c). A hard link to a folder is created for that: every
    system refuses it, but only after the refresh.

    A name that the client has cached as absent may exist; then the server refuses the rename that follows.

    Raises:
        OSError: The parent folder cannot be read.
    """
    with contextlib.suppress(OSError):
        os.link(path.parent, path)
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None
