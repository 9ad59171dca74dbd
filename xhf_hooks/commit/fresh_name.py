"""What a name stands for now, whatever this client of a network file system remembers of it.

Clients cache which folder or file a name stands for, for up to a minute (NFS: acdirmax; MooseFS: mfsdirentrycacheto;
every FUSE client: entry_timeout). A name that another host has renamed or replaced meanwhile leads to what it stood for
before, and deleting it would delete that. So, before rank 0 acts on a name that another host may have made, it asks.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def look_up(path: Path) -> os.stat_result | None:
    """What the server has under a name, itself and not what it links to; None: nothing. Runs on: rank 0.

    Making something new must ask the server whether the name is free, and what the client remembers is put right on the
    way (Linux: LOOKUP_EXCL in fuse_dentry_revalidate, fs/fuse/dir.c, and in nfs_do_lookup_revalidate, fs/nfs/dir.c).
    A name that the client knows to be free needs no asking: it is given to something else by a rename, which asks.

    Raises:
        OSError: The folder that it is in cannot be read or written.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.ESTALE:  # what it stood for is deleted
            raise
    try:
        os.mkdir(path)
    except FileExistsError:
        return os.lstat(path)
    os.rmdir(path)  # it was gone
    return None
