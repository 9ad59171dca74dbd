"""Where committed saves go."""

from __future__ import annotations

from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.store import StoreFolder

#: A folder on a file system, or a prefix in an object store. :class:`CheckpointFolder` explains what both do.
SaveTarget = CheckpointFolder | StoreFolder
