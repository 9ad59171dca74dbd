"""What a name stands for now, whatever this client of a network file system remembers of it.

Clients cache which folder or file a name stands for, for up to a minute (NFS: acdirmax; MooseFS: mfsdirentrycacheto;
every FUSE client: entry_timeout). A name that another host has renamed or replaced meanwhile leads to what it stood for
before, and deleting it would delete that. So, before rank 0 acts on a name that another host may have made, it asks.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def look_up(path: Path) -> os.stat_result | None:
    """What the server has under a name, itself and not what it links to; None: nothing. Runs on: rank 0.

    Making something new must ask the server what the name stands for, and what the client remembers is put right on the
    way (Linux: LOOKUP_EXCL in fuse_dentry_revalidate, fs/fuse/dir.c, and in nfs_do_lookup_revalidate, fs/nfs/dir.c). A
    hard link to a folder is something new that is never made: every system refuses it, but only after that.

    What the client remembers not to exist may be there: then the rename that follows is refused by the server.

    Raises:
        OSError: The folder that it is in cannot be read.
    """
    with contextlib.suppress(OSError):
        os.link(path.parent, path)
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None
