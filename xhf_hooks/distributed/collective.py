"""Agreement between ranks: an error on one becomes the same error on all, never a hang.

Everything here runs on a gloo group of its own. While one rank writes to a slow disk the others wait on this group,
with its time-out, so no NCCL collective spans a disk write.

Small values go up a binomial tree to rank 0 and come back by broadcast: an agreement of N ranks takes 2 log2(N) steps;
gloo's own all-reduce takes 2 (N - 1), one after the other.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BarrierOptions, _set_pg_timeout

from xhf_hooks.errors import AgreedError, PlanError, RankLostError
from xhf_hooks.files.open_files import allow_open_files

T = TypeVar('T')
#: How long making a group may take. All ranks are about to begin: one that does not come now never will.
CONNECT_TIMEOUT_SECS = 120.0


class Collective:
    """The ranks of a run, able to agree. One process without torch.distributed is a run of one rank.

    Runs on: all ranks must build it, use it and close it in the same order.

    Args:
        timeout_secs: How long a rank waits for the others, for example while rank 0 writes.
        connect_timeout_secs: How long it waits for them here, where no rank has other work.

    Raises:
        RankLostError: A rank did not come.
        LimitError: This process may not open as many files as there are ranks.
    """

    def __init__(self, timeout_secs: float = 7200.0, connect_timeout_secs: float = CONNECT_TIMEOUT_SECS) -> None:
        (self.rank, self.world_size), self._group = rank_and_world_size(), None
        self._timeout = timedelta(seconds=timeout_secs)
        self._remembered: tuple[str, Exception] | None = None
        self._is_shared = False
        if self.world_size > 1:
            allow_open_files(self.world_size, f'connections to {self.world_size} ranks')
            self._group = self._connect(connect_timeout_secs)

    @classmethod
    def shared(cls) -> Collective:
        """The one of this process's default group: made by the first call and reused until that group ends.

        Runs on: all ranks. For repeated callers; :meth:`close` leaves it open.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        found = _SHARED.get(dist.group.WORLD)
        if found is None:
            found = _SHARED[dist.group.WORLD] = cls()
            found._is_shared = True
        return found

    def agree(self, stage: str, error: Exception | None = None) -> None:
        """Raise on every rank if any rank brings an error, now or remembered. Runs on: all ranks.

        Raises:
            AgreedError: Some rank failed; the same on every rank.
            RankLostError: A rank did not answer.
        """
        if error is not None:
            self.remember(stage, error)
        own, self._remembered = self._remembered, None
        if not self.any(own is not None, stage):
            return
        reports = self.all_gather(None if own is None else (own[0], f'{type(own[1]).__name__}: {own[1]}'))
        failures = {rank: report[1] for rank, report in enumerate(reports) if report is not None}
        failed_stage = next(report[0] for report in reports if report is not None)
        raise AgreedError(failed_stage, failures) from (None if own is None else own[1])

    def remember(self, stage: str, error: Exception) -> None:
        """Keep a failure for the next agreement; until then this rank takes part as usual. The first one counts."""
        if self._remembered is None:
            self._remembered = (stage, error)

    @property
    def is_failing(self) -> bool:
        """Whether this rank remembers a failure."""
        return self._remembered is not None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run a block on all ranks and agree at its end, whatever happened in it. Runs on: all ranks.

        The block must end or raise without waiting for a rank that may have failed. Inside it :meth:`agree` may be
        called at points that all ranks pass.
        """
        try:
            yield
        except (AgreedError, RankLostError):
            raise
        except Exception as error:  # whatever it is, every rank must learn of it
            self.agree(name, error)
        else:
            self.agree(name)

    def wait(self, stage: str) -> None:
        """A barrier of log2(N) steps; agrees on nothing. Runs on: all ranks."""
        if self.world_size > 1:
            with self._in_touch(stage):
                options = BarrierOptions()
                options.device = torch.device('cpu')  # dist.barrier would take the GPU to which the run is bound
                self._group.barrier(options).wait()

    def any(self, flag: bool, stage: str = 'exchange') -> bool:
        """Whether any rank has the flag. Runs on: all ranks."""
        return bool(self.all_reduce(np.array([flag], np.uint8), np.maximum, stage)[0])

    def all_reduce(
        self, values: np.ndarray, merge: Callable[[np.ndarray, np.ndarray], np.ndarray], stage: str = 'exchange'
    ) -> np.ndarray:
        """All ranks' numbers, merged pairwise, on every rank. Runs on: all ranks.

        Args:
            values: A few; of the same shape and type on all ranks.
        """
        if self.world_size == 1:
            return values
        children, parent = self._tree()
        with self._in_touch(stage):
            for child in children:
                theirs = np.empty_like(values)
                self._receive(theirs, child)
                values = merge(values, theirs)
            if parent is not None:
                self._send(values, parent)
            merged = torch.from_numpy(np.array(values))
            dist.broadcast(merged, 0, group=self._group)
        return merged.numpy()

    def reduce(self, records: np.ndarray, merge: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """All ranks' records, merged pairwise, on rank 0; elsewhere a partial result. Runs on: all ranks.

        An error of ``merge`` is remembered.

        Args:
            records: Of the same type on all ranks, in any number.
            merge: Called with those of consecutive ranks, the lower ones first.
        """
        if self.world_size == 1:
            return records
        children, parent = self._tree()
        with self._in_touch('exchange'):
            for child in children:
                length = np.empty(1, np.int64)
                self._receive(length, child)
                theirs = np.empty(length[0], records.dtype)
                self._receive(theirs, child)
                try:
                    records = merge(records, theirs)
                except Exception as error:  # the ranks above in the tree wait for this one
                    self.remember('exchange', error)
            if parent is not None:
                self._send(np.array([len(records)], np.int64), parent)
                self._send(records, parent)
        return records

    def broadcast(self, value: T) -> T:
        """Rank 0's value; those of other ranks are ignored. Runs on: all ranks."""
        if self.world_size == 1:
            return value
        content = _pickled(value if self.rank == 0 else None)
        length = torch.tensor([content.numel()])
        with self._in_touch('exchange'):
            dist.broadcast(length, 0, group=self._group)
            if self.rank != 0:
                content = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(content, 0, group=self._group)
        return pickle.loads(content.numpy())

    def exchange(self, value: T, distance: int) -> T:
        """Send a value to rank ``rank + distance``, receive that of ``rank - distance``. Runs on: all ranks."""
        if self.world_size == 1:
            return value
        to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
        mine, length = _pickled(value), torch.empty(1, dtype=torch.int64)
        with self._in_touch('exchange'):
            self._swap(torch.tensor([mine.numel()]), to, length, source)
            theirs = torch.empty(int(length), dtype=torch.uint8)
            self._swap(mine, to, theirs, source)
        return pickle.loads(theirs.numpy())

    def post(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], stage: str
    ) -> Callable[[], None]:
        """Begin to send bytes to ranks and to receive bytes from ranks. Runs on: those that are named, in step.

        Both sides must know how many. What is on a device goes by the run's own group, for that is the one with a
        backend for it, after :meth:`connect_device`.

        Returns:
            Waits for the end of all of it, during which nobody may touch the tensors.
        """
        if not outgoing and not incoming:  # as always on one rank, which has no group
            return lambda: None
        on_host = all(tensor.device.type == 'cpu' for tensor in (*outgoing.values(), *incoming.values()))
        with self._in_touch(stage):
            group = self._group if on_host else dist.group.WORLD
            operations = [dist.P2POp(dist.isend, tensor, rank, group) for rank, tensor in outgoing.items()]
            operations += [dist.P2POp(dist.irecv, tensor, rank, group) for rank, tensor in incoming.items()]
            works = dist.batch_isend_irecv(operations)

        def finish() -> None:
            with self._in_touch(stage):
                for work in works:
                    work.wait(self._timeout)

        return finish

    def connect_device(self, device: torch.device) -> None:
        """Begin to use the run's own group for a device. Runs on: all ranks.

        nccl wants all ranks in the first operation of a group, and not all of them have something to :meth:`post`
        (``torch.distributed.batch_isend_irecv``).
        """
        if self.world_size > 1:
            with self._in_touch('send'):
                dist.all_reduce(torch.zeros(1, device=device))

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order; for small values, rarely. Runs on: all ranks."""
        if self.world_size == 1:
            return [value]
        values: list[T] = [value] * self.world_size
        with self._in_touch('exchange'):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def require_same(self, what: str, digest: str, describe: Callable[[], list[str]]) -> None:
        """Check that all ranks hold the same thing. Runs on: all ranks.

        Args:
            digest: Compared first, so that nothing large is sent when all is well.
            describe: The thing itself, line by line; called only to name the first difference.

        Raises:
            PlanError: It differs; both sides are named.
        """
        if not self.any(digest != self.broadcast(digest)):
            return
        digests = self.all_gather(digest)
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        everyone = self.all_gather(describe())
        ours, theirs = everyone[0], everyone[odd[0]]
        pairs = enumerate(zip_longest(ours, theirs, fillvalue='nothing more'))
        first, sides = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        raise PlanError(
            f'{what} differs between ranks 0 and {odd}: line {first} is {sides[0]!r} on rank 0 and '
            f'{sides[1]!r} on rank {odd[0]}. All ranks must hold the same model.'
        )

    def close(self) -> None:
        """Destroy the group; a shared one stays for the next call. Runs on: all ranks."""
        if not self._is_shared:
            self.abandon()

    def abandon(self) -> None:
        """Close all connections, shared ones too, so that ranks that wait for this one fail at once.

        Runs on: a rank that leaves in the middle, with an error that is not agreed.
        """
        if self._group is not None:
            group, self._group = self._group, None
            with contextlib.suppress(ValueError):  # it went with the default group, as in a notebook
                dist.destroy_process_group(group)
        if self._is_shared and dist.group.WORLD is not None:
            _SHARED.pop(dist.group.WORLD, None)

    def _connect(self, timeout_secs: float) -> dist.ProcessGroup:
        # A new group's time-out also limits the search for its ranks in the store: short for that, then long
        try:
            group = dist.new_group(backend='gloo', timeout=timedelta(seconds=timeout_secs))
        except RuntimeError as error:
            raise RankLostError(
                f'rank {self.rank} found not all of the {self.world_size} ranks within {timeout_secs:.0f} s, before '
                f'a save: one has died, or has not come to it: {error}'
            ) from error
        _set_pg_timeout(self._timeout, group)
        return group

    def _tree(self) -> tuple[list[int], int | None]:
        """The ranks that this one receives from, in order, and the one that it sends to; None for rank 0."""
        children, step = [], 1
        while step < self.world_size and self.rank % (2 * step) == 0:
            if self.rank + step < self.world_size:
                children.append(self.rank + step)
            step *= 2
        return children, self.rank - step if self.rank else None

    # Each wait gets the time-out: point-to-point operations otherwise use the one that the group was made with

    def _send(self, values: np.ndarray, rank: int) -> None:
        dist.isend(_as_tensor(values), rank, group=self._group).wait(self._timeout)

    def _receive(self, values: np.ndarray, rank: int) -> None:
        dist.irecv(_as_tensor(values), rank, group=self._group).wait(self._timeout)

    def _swap(self, mine: torch.Tensor, to: int, theirs: torch.Tensor, source: int) -> None:
        sending = dist.isend(mine, to, group=self._group)
        dist.irecv(theirs, source, group=self._group).wait(self._timeout)
        sending.wait(self._timeout)

    @contextmanager
    def _in_touch(self, stage: str) -> Iterator[None]:
        what = f'rank {self.rank} lost touch with the others in stage {stage!r} of a save'
        if self._group is None:
            raise RankLostError(f'{what}: the connection broke in an earlier one')
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises for a closed connection and a time-out
            # Otherwise ranks that wait for this one would do so until their own time-out
            self.abandon()
            secs = self._timeout.total_seconds()
            raise RankLostError(f'{what}; it waits at most {secs:.0f} s for them: {error}') from error


#: What :meth:`Collective.shared` has made, for as long as the process group exists.
_SHARED: WeakKeyDictionary[dist.ProcessGroup, Collective] = WeakKeyDictionary()


def _as_tensor(values: np.ndarray) -> torch.Tensor:
    """A view of its bytes."""
    return torch.from_numpy(values.view(np.uint8))


def _pickled(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def rank_and_world_size() -> tuple[int, int]:
    """0 and 1 where there is no process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
