"""Whether all ranks see one folder: found out, not assumed."""

from __future__ import annotations

import uuid
from pathlib import Path

from xhf_hooks.collective import Collective
from xhf_hooks.errors import TargetError


def is_shared(folder: Path, collective: Collective) -> bool:
    """Rank 0 writes a file of a new name, every rank looks for it. Runs on: all ranks.

    Raises:
        AgreedError: Rank 0 cannot write there.
    """
    token = uuid.uuid4().hex  # a new name: network file systems remember for a while which names do not exist
    token = collective.all_gather(token)[0]
    probe = folder / f'.xhf-shared-{token}'
    with collective.stage('preflight'):
        if collective.rank == 0:
            _write_probe(probe, token)
    try:
        found = probe.read_text() == token
    except OSError:
        found = False
    seen = collective.all_gather(found)
    if collective.rank == 0:
        probe.unlink(missing_ok=True)
    return all(seen)


def _write_probe(probe: Path, token: str) -> None:
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text(token)
    except OSError as error:
        raise TargetError(f'{probe.parent} cannot be written: {error}; set out_dir to a folder that can') from error
