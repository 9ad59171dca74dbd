"""Agreement between ranks: an error on one becomes the same error on all, never a hang.

Everything here runs on a gloo group of its own. While one rank writes to a slow disk the others wait
on this group, with this group's time-out, so no NCCL collective ever spans a disk write.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from xhf_hooks.errors import AgreedError, PlanError, RankLostError

T = TypeVar('T')


class Collective:
    """The ranks of a run, able to agree. One process without torch.distributed is a run of one rank.

    Runs on: all ranks must build it, use it and close it in the same order.

    Args:
        timeout_secs: How long a rank waits for the others, for example while rank 0 writes.
    """

    def __init__(self, timeout_secs: float = 7200.0) -> None:
        self.rank, self.world_size, self._group = 0, 1, None
        self._timeout_secs = timeout_secs
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size > 1:
            self._group = dist.new_group(backend='gloo', timeout=timedelta(seconds=timeout_secs))

    def agree(self, stage: str, error: Exception | None = None) -> None:
        """Raise on every rank if any rank brings an error. Runs on: all ranks.

        One small all-reduce when all is well.

        Raises:
            AgreedError: Some rank failed; the same on every rank.
            RankLostError: A rank did not answer.
        """
        if self.world_size == 1:
            if error is not None:
                raise AgreedError(stage, {0: _describe(error)}) from error
            return
        failed = torch.tensor([int(error is not None)], dtype=torch.int32)
        with self._in_touch(stage):
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if not failed.item():
            return
        reports = self.all_gather(None if error is None else (stage, _describe(error)))
        failures = {rank: report[1] for rank, report in enumerate(reports) if report is not None}
        failed_stage = next(report[0] for report in reports if report is not None)
        raise AgreedError(failed_stage, failures) from error

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run a block on all ranks and agree at its end, whatever happened in it. Runs on: all ranks.

        The block must reach its end, or raise, without waiting for a rank that may have failed; inside
        it :meth:`agree` may be called at points that all ranks pass.
        """
        try:
            yield
        except (AgreedError, RankLostError):
            raise
        except Exception as error:  # whatever it is, every rank must learn of it
            self.agree(name, error)
        else:
            self.agree(name)

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order. Runs on: all ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._in_touch('exchange'):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value. Runs on: all ranks."""
        if self.world_size == 1:
            return value
        values = [value]
        with self._in_touch('exchange'):
            dist.broadcast_object_list(values, group_src=0, group=self._group)
        return values[0]

    def exchange(self, value: T, distance: int) -> T:
        """Send a value to the rank that is ``distance`` further on, and get that of the one as far back.

        Runs on: all ranks. What a rank sends and gets does not grow with the number of ranks.
        """
        if self.world_size == 1:
            return value
        to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        nbytes = torch.zeros(1, dtype=torch.int64)
        with self._in_touch('exchange'):
            self._send_receive(torch.tensor([mine.numel()]), to, nbytes, source)
            theirs = torch.empty(int(nbytes), dtype=torch.uint8)
            self._send_receive(mine, to, theirs, source)
        return pickle.loads(theirs.numpy().tobytes())

    def _send_receive(self, mine: torch.Tensor, to: int, theirs: torch.Tensor, source: int) -> None:
        sending = dist.isend(mine, group_dst=to, group=self._group)
        dist.recv(theirs, group_src=source, group=self._group)
        sending.wait()

    def require_same(self, what: str, digest: str, describe: Callable[[], list[str]]) -> None:
        """Check that all ranks hold the same thing. Runs on: all ranks.

        Args:
            digest: Compared first, so that nothing large travels while all is well.
            describe: The thing itself, line by line; called only to name the first difference.

        Raises:
            PlanError: It differs; both sides are named.
        """
        digests = self.all_gather(digest)
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if not odd:
            return
        everyone = self.all_gather(describe())
        ours, theirs = everyone[0], everyone[odd[0]]
        pairs = enumerate(zip_longest(ours, theirs, fillvalue='nothing more'))
        first, sides = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        raise PlanError(
            f'{what} differs between ranks 0 and {odd}: line {first} is {sides[0]!r} on rank 0 and '
            f'{sides[1]!r} on rank {odd[0]}. All ranks must hold the same model.'
        )

    @contextmanager
    def _in_touch(self, stage: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises for a closed connection and a time-out
            raise RankLostError(
                f'rank {self.rank} lost touch with the others in stage {stage!r} of a save; it waits at most '
                f'{self._timeout_secs:.0f} s for them: {error}'
            ) from error

    def close(self) -> None:
        """Give the group back. Runs on: all ranks."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _describe(error: Exception) -> str:
    return f'{type(error).__name__}: {error}'
