"""Runs that save into a store and are killed at a request that the test chooses."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.killed_ranks import WORLD_SIZE, ending, join_group
from tests.helpers.ranks import start_process
from tests.helpers.s3_servers import BUCKET, CREDENTIALS

URL = f's3://{BUCKET}/killed'
#: The smallest part that S3 accepts: larger files have several parts.
PART_NBYTES = 5 * 2**20
_EXIT_AFTER_LOSS = 3


@dataclass(frozen=True)
class Strike:
    """The rank and the number of its request at which it kills itself or all ranks.

    Attributes:
        before: Kill before the request is sent; otherwise after its answer.
    """

    rank: int
    number: int
    before: bool
    all_ranks: bool


def live(parent: Path, backend_args: dict[str, Any], step: int, strike: Strike | None) -> list[int]:
    """One run of two ranks that saves once.

    Returns:
        Number of requests of each rank; -1 for ranks that were killed or lost the other one.
    """
    store = parent / f'rendezvous-{step}'
    told = [parent / f'requests-{step}-{rank}' for rank in range(WORLD_SIZE)]
    pids = parent / f'pids-{step}'
    pids.mkdir()
    ranks: list[Any] = []
    with ending(ranks, strike):
        for rank in range(WORLD_SIZE):
            ranks.append(start_process(_rank, rank, str(store), str(pids), str(told[rank]), backend_args, step, strike))
    if strike is None:
        assert [rank.exitcode for rank in ranks] == [0] * WORLD_SIZE
    return [int(path.read_text()) if path.exists() else -1 for path in told]


def _rank(
    rank: int, store: str, pids: str, told: str, backend_args: dict[str, Any], step: int, strike: Strike | None
) -> None:
    os.environ.update(CREDENTIALS)
    import torch
    import torch.distributed as dist

    from tests.helpers.zoo.llamas import llama
    from xhf_hooks import save_hf
    from xhf_hooks.errors import XhfError
    from xhf_hooks.places import objects

    Path(pids, str(rank)).write_text(str(os.getpid()))
    join_group(rank, store)
    dist.barrier()
    objects._S3_PART_NBYTES = PART_NBYTES
    count = _count_requests(rank, pids, strike)
    model = llama(vocab_size=120_000, tie_word_embeddings=False)  # has two tensors of 5.8 MB
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(step))
    try:
        save_hf(model.to(torch.bfloat16), URL, step=step, backend_args=backend_args, max_shard_size='6MB')
    except XhfError as error:
        print(f'rank {rank}: {error}', flush=True)
        os._exit(_EXIT_AFTER_LOSS)
    Path(told).write_text(str(count[0]))
    os._exit(0)


def _count_requests(rank: int, pids: str, strike: Strike | None) -> list[int]:
    """Count requests, and kill at the chosen one."""
    from aiobotocore.httpsession import AIOHTTPSession

    send, count = AIOHTTPSession.send, [0]

    def kill() -> None:
        victims = [int(path.read_text()) for path in Path(pids).iterdir()] if strike.all_ranks else []
        for victim in sorted(victims, key=lambda pid: pid == os.getpid()):  # itself last
            os.kill(victim, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    async def counted(self: Any, request: Any) -> Any:
        count[0] += 1
        is_due = strike is not None and (strike.rank, strike.number) == (rank, count[0])
        if is_due and strike.before:
            kill()
        answer = await send(self, request)
        if is_due:
            kill()
        return answer

    AIOHTTPSession.send = counted
    return count


def newest_step(backend_args: dict[str, Any], folder: Path) -> int:
    """Check the whole save that the pointer names against its checksums; returns its step.

    Raises:
        AssertionError, XhfError: It is incomplete, or mixes saves.
    """
    import torch
    from safetensors.torch import load_file

    from tests.helpers.stored_saves import download_newest
    from xhf_hooks.integrity.check import check_folder
    from xhf_hooks.integrity.manifest import read_manifest
    from xhf_hooks.places.objects import open_store
    from xhf_hooks.places.store import read_pointer

    store = open_store(URL, backend_args)
    pointer = read_pointer(store, 'hf_model')
    found = download_newest(store, folder)
    check_folder(found, read_manifest(found))
    step = pointer.step['number']
    for file in found.glob('*.safetensors'):
        for tensor in load_file(file).values():
            assert torch.equal(tensor, torch.full_like(tensor, float(step)))
    return step
