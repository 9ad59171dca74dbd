"""Votes of ranks: an error on one rank becomes the same error on all, never a hang.

Everything here runs on a separate gloo group. While one rank writes to a slow disk, the other ranks wait on this group,
with its own time-out, so no NCCL collective spans a disk write.

A rank that fails must do next what the other ranks do next, or they wait for it. The rules that see to that, with an
example: "Stages and votes" in docs/how-it-works.md. In short: what ranks do together stands in a
:meth:`Collective.stage`, which ends with a vote, and all that communicates starts with a vote. So values are exchanged
by :meth:`~Collective.from_rank0`, :meth:`~Collective.from_all_ranks` and :meth:`~Collective.reduce_over_ranks`: they
call the function that computes the values, vote, and exchange what it returned.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BarrierOptions

from xhf_hooks.compat.torch import new_gloo_group, rank_and_world_size, spread_maximum
from xhf_hooks.errors import AgreedError, RankLostError, SharedError
from xhf_hooks.ranks import rendezvous
from xhf_hooks.ranks.rendezvous import find_store, wait_for_all_ranks
from xhf_hooks.system.files import allow_open_files

T = TypeVar('T')
#: What a rank votes that has failed; otherwise 1 or 0 for a flag that is set or not.
_FAILED = 2
#: Time limit for connecting all ranks, once all have come.
CONNECT_TIMEOUT_SECS = 120.0
#: How long a rank that has lost contact waits for the other ranks to reconnect. Ranks in step notice the loss together.
#: A rank that died never comes, and each later save waits as long for it. A rank that comes later misses this save.
_CONNECT_AGAIN_SECS = 5.0
_POLL_SECS = 0.0005
#: Named in every call: the script may have set another default device (torch.set_default_device).
_HOST = torch.device('cpu')
#: Up to this many ranks, gloo's ring all-reduce is as fast as the log2(N) steps of :func:`.spread_maximum`.
_RING_RANKS = 8
#: Tag of votes, which keeps them apart from the tensors that :meth:`Collective.post` sends.
_VOTE = 1
#: How long a rank that leaves waits for the answer to its last :meth:`Collective.start_maxima`.
_END_SECS = 5.0


@dataclass
class Flag:
    """A rank may set it inside a :meth:`Collective.stage`; after that, it is set on all ranks, or on none."""

    is_set: bool = False


class Collective:
    """The ranks of a run, which vote and exchange small values. Without torch.distributed, there is one."""

    def __init__(self, timeout_secs: float) -> None:
        self.rank, self.world_size = rank_and_world_size()
        # Nothing else may refer to these: connections would outlive `close`, and ranks waiting for this one not notice
        self._group: Any = None
        self._in_flight: Any = None  # of start_maxima()
        self._timeout = timedelta(seconds=timeout_secs)
        self._remembered: tuple[str, Exception] | None = None
        self._shared_as: str | None = None  # its use, if it is shared
        self._meeting = ''  # the store's prefix under which ranks met, new at each connection
        self._n_ensured = 0  # calls of ensure_connected()

    @classmethod
    def connect(cls, timeout_secs: float = 7200.0) -> Collective:
        """Connect all ranks, which use the collective in the same order. Runs on: all ranks.

        Args:
            timeout_secs: How long a rank waits for the other ranks, for example while rank 0 writes.

        Raises:
            RankLostError: A rank did not connect.
            LimitError: This process may not open as many files as there are ranks.
        """
        collective = cls(timeout_secs)
        if collective.world_size > 1:
            allow_open_files(collective.world_size, f'connections to {collective.world_size} ranks')
            collective._open(timeout_secs)
        return collective

    @classmethod
    def shared(cls, use: str = 'saves') -> Collective:
        """A collective of this process's default group: created by the first call, shared until that group ends.

        Runs on: all ranks. For repeated callers: :meth:`close` leaves it open.

        Args:
            use: What it is shared for: each use has its own.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls.connect()
        of_group = _SHARED.setdefault(dist.group.WORLD, {})
        found = of_group.get(use)
        if found is None:
            found = of_group[use] = cls.connect()
            found._shared_as = use
        else:
            found.ensure_connected()
        return found

    @classmethod
    def abandon_shared(cls) -> None:
        """Close the connections of all shared ones, as :meth:`abandon`."""
        if dist.is_available() and dist.is_initialized():
            for one in [*_SHARED.get(dist.group.WORLD, {}).values()]:
                one.abandon()

    @property
    def is_connected(self) -> bool:
        """Whether this rank knows of no broken connection."""
        return self.world_size == 1 or self._group is not None

    def ensure_connected(self) -> bool:
        """Vote, and reconnect if a connection has broken. Runs on: all ranks.

        Call it before ranks communicate again after a pause: a firewall may have dropped idle connections. A rank that
        waits for half a minute logs which ranks have not come.

        Returns:
            Whether a connection had broken.

        Raises:
            AgreedError: Some rank failed.
            RankLostError: Ranks could not connect again.
        """
        self._n_ensured += 1
        timer = threading.Timer(rendezvous.WARN_AFTER_SECS, self._warn_of_missing_ranks)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread can be started while the interpreter exits
            timer.start()
        try:
            self.raise_if_any_failed('beginning')
            return False
        except RankLostError:
            self.reconnect()
            return True
        finally:
            timer.cancel()

    def reconnect(self) -> None:
        """Replace all connections; a RankLostError if ranks cannot connect. Runs on: all ranks."""
        self.abandon()
        try:
            self._open(min(self._timeout.total_seconds(), _CONNECT_AGAIN_SECS))
        except RankLostError as error:
            raise RankLostError(
                f'rank {self.rank} lost contact with the other ranks, and could not connect again: {error}'
            ) from error
        if self._shared_as is not None and dist.group.WORLD is not None:
            _SHARED.setdefault(dist.group.WORLD, {})[self._shared_as] = self

    def raise_if_any_failed(self, stage: str) -> None:
        """Raise the same error on every rank if any rank remembers one. Runs on: all ranks.

        Raises:
            AgreedError: Some rank failed.
            RankLostError: A rank did not answer.
        """
        self.vote_any(False, stage)

    def vote_any(self, flag: bool, stage: str = 'exchange') -> bool:
        """Whether the flag is set on any rank. It is also a vote, with the errors of :meth:`raise_if_any_failed`."""
        own, self._remembered = self._remembered, None
        vote = _FAILED if own is not None else int(flag)
        most = int(self._all_reduce(np.array([vote], np.uint8), 'MAX', stage)[0])
        if most != _FAILED:
            return bool(most)
        reports = self._all_gather(None if own is None else (own[0], f'{type(own[1]).__name__}: {own[1]}'))
        failures = {rank: report[1] for rank, report in enumerate(reports) if report is not None}
        failed_stage = next(report[0] for report in reports if report is not None)
        raise AgreedError(failed_stage, failures) from (None if own is None else own[1])

    @contextmanager
    def remembering(self, stage: str) -> Iterator[None]:
        """Keep the first error for the next vote; until then this rank takes part as usual."""
        try:
            yield
        except Exception as error:  # of any type: every rank must learn of it
            self._remembered = self._remembered or (stage, error)

    @property
    def has_remembered_error(self) -> bool:
        """Whether this rank remembers an error."""
        return self._remembered is not None

    @contextmanager
    def stage(self, name: str) -> Iterator[Flag]:
        """Run a block and vote at its end, even if it raised. Runs on: all ranks.

        The block must end or raise without waiting for a rank that may have failed. At points that all ranks pass, it
        may call :meth:`raise_if_any_failed` and contain other stages. The flag that it is given travels with the vote.
        """
        flag = Flag()
        try:
            yield flag
        except SharedError:
            raise
        except Exception as error:  # of any type: every rank must learn of it
            self._remembered = self._remembered or (name, error)
        flag.is_set = self.vote_any(flag.is_set, name)

    def wait(self, stage: str) -> None:
        """A barrier of log2(N) steps, without a vote. Runs on: all ranks."""
        if self.world_size > 1:
            with self._in_touch(stage):
                options = BarrierOptions()
                options.device = _HOST  # dist.barrier would use the run's GPU
                self._group.barrier(options).wait()

    def start_maxima(self, numbers: Sequence[int], stage: str) -> Callable[[], list[int]]:
        """Begin to find the largest of all ranks' first numbers, second numbers, and so on. Runs on: all ranks.

        Only one may be in flight. Errors that ranks remember are not exchanged, unlike by :meth:`vote_any`.

        Args:
            numbers: From 0 to 255, as many on all ranks.

        Returns:
            A function that waits for them.
        """
        if self.world_size == 1:
            return lambda: [*numbers]
        maxima = torch.tensor(numbers, dtype=torch.uint8, device=_HOST)
        with self._in_touch(stage):
            self._in_flight = dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def answer() -> list[int]:
            self._wait_for_answer(math.inf)  # handles signals meanwhile, unlike the work's own wait()
            with self._in_touch(stage):
                work = self._in_flight
                self._in_flight = None
                work.wait()
            return list(map(int, maxima.tolist()))

        return answer

    def from_rank0(self, stage: str, decide: Callable[[], T]) -> T:
        """What ``decide`` returns on rank 0, the only rank that calls it; its errors are voted on. Runs on: all ranks.

        For decisions that depend on metrics, clocks, free space or files.
        """
        decided: list[T] = []
        with self.stage(stage):
            if self.rank == 0:
                decided.append(decide())
        return self._broadcast(decided)[0]

    def from_all_ranks(self, stage: str, compute: Callable[[], T]) -> list[T]:
        """What ``compute`` returns on each rank, in rank order; for rare, small values. Its errors are voted on."""
        computed: list[T] = []
        with self.stage(stage):
            computed.append(compute())
        return self._all_gather(computed[0])

    def reduce_over_ranks(
        self, stage: str, compute: Callable[[], Sequence[np.ndarray]], operations: Sequence[str]
    ) -> list[np.ndarray]:
        """Merge the numbers that ``compute`` returns on each rank; its errors are voted on. Runs on: all ranks.

        Args:
            compute: Returns arrays, which have the same shapes and integer types on all ranks.
            operations: How to merge each array: one of those of ``torch.distributed.ReduceOp``, such as ``'SUM'``.
        """
        computed: list[np.ndarray] = []
        with self.stage(stage):
            computed += compute()
        return [self._all_reduce(one, operation, stage) for one, operation in zip(computed, operations, strict=True)]

    def post(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], stage: str
    ) -> Callable[[], None]:
        """Start sending bytes to ranks and receiving them; both sides know how many. Runs on: the named ranks, in step.

        Returns:
            A function that waits until all bytes have arrived. Until then the tensors must not be touched.
        """
        if not outgoing and not incoming:  # always so with a single rank, which has no group
            return lambda: None
        with self._in_touch(stage):
            operations = [dist.P2POp(dist.isend, tensor, rank, self._group) for rank, tensor in outgoing.items()]
            operations += [dist.P2POp(dist.irecv, tensor, rank, self._group) for rank, tensor in incoming.items()]
            works = dist.batch_isend_irecv(operations)

        def finish() -> None:
            with self._in_touch(stage):
                for work in works:
                    work.wait(self._timeout)

        return finish

    def close(self) -> None:
        """Destroy the group; a shared one stays open. Waits for no rank: those that still wait for this one fail."""
        if self._shared_as is None:
            self.abandon()

    def abandon(self) -> None:
        """Close all connections, even shared ones, so that ranks waiting for this one fail at once.

        Runs on: a rank that leaves in the middle with an error that the other ranks do not know.
        """
        if self._group is not None:
            group, self._group = self._group, None
            if not self._wait_for_answer(_END_SECS):
                return  # torch would wait for it as long as the time-out, if a rank hangs
            self._in_flight = None  # else the connections would stay open, and the ranks waiting for this one wait on
            # torch 2.6 and older join gloo's threads with the GIL held. Such a thread may be waiting for it to free a
            # tensor: a deadlock. The backend's own Python object releases the GIL, so it must be the last reference.
            backend = group._get_backend(torch.device('cpu'))
            with contextlib.suppress(ValueError):  # destroyed with the default group, as in a notebook
                dist.destroy_process_group(group)
            del group, backend  # in this order
        if self._shared_as is not None and dist.group.WORLD is not None:
            _SHARED.get(dist.group.WORLD, {}).pop(self._shared_as, None)

    def _all_reduce(self, values: np.ndarray, operation: str, stage: str) -> np.ndarray:
        if self.world_size == 1 or values.size == 0:
            return values
        with self._in_touch(stage):
            merged = torch.from_numpy(np.array(values))
            if operation == 'MAX' and merged.numel() == 1 and self.world_size > _RING_RANKS:
                spread_maximum(merged, self._group, self._timeout, _VOTE)
            else:
                dist.all_reduce(merged, getattr(dist.ReduceOp, operation), group=self._group)
        return merged.numpy()

    def _broadcast(self, value: T) -> T:
        """Rank 0's value."""
        values = [value]
        if self.world_size > 1:
            with self._in_touch('exchange'):
                dist.broadcast_object_list(values, 0, self._group, _HOST)
        return values[0]

    def _all_gather(self, value: T) -> list[T]:
        values: list[T] = [value] * self.world_size
        if self.world_size > 1:
            with self._in_touch('exchange'):
                dist.all_gather_object(values, value, group=self._group)
        return values

    def _wait_for_answer(self, secs: float) -> bool:
        """Wait for the answer to :meth:`start_maxima`, at most ``secs``; returns whether it has come."""
        deadline = time.monotonic() + secs
        while self._in_flight is not None and not self._in_flight.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECS)
        return True

    def _open(self, timeout_secs: float) -> None:
        """Wait until all ranks are here, and connect to them."""
        store = find_store('xhf_hooks')
        self._meeting = '' if store is None else wait_for_all_ranks(store, self.rank, self.world_size, timeout_secs)
        try:
            connect_timeout = timedelta(seconds=CONNECT_TIMEOUT_SECS)
            self._group = new_gloo_group(connect_timeout, self._timeout, prefix=f'xhf_hooks/{self._meeting}')
        except RuntimeError as error:
            raise RankLostError(
                f'rank {self.rank} did not connect to all {self.world_size} ranks within {CONNECT_TIMEOUT_SECS:.0f} s, '
                f'before a save: a rank died, or its host name resolves to 127.0.x.x, where other '
                f"nodes don't find it (set GLOO_SOCKET_IFNAME to the network interface, such as eth0): {error}"
            ) from error

    def _warn_of_missing_ranks(self) -> None:
        """Log which ranks have not arrived, on the first rank to wait this long. Runs on: a timer's thread."""
        store = find_store(f'xhf_hooks/{self._meeting}/{self._n_ensured}')
        with contextlib.suppress(RuntimeError):  # the rank that hosts it may be gone
            if store is not None:
                rendezvous.register_waiting_rank(store, self.rank, self.world_size)

    @contextmanager
    def _in_touch(self, stage: str) -> Iterator[None]:
        what = f'rank {self.rank} lost contact with the other ranks in stage {stage!r} of a save'
        if self._group is None:
            raise RankLostError(f'{what}: the connection broke earlier')
        try:
            yield
        except Exception as error:  # of any type: a closed connection, a time-out, no memory for the answer
            # Otherwise ranks waiting for this one would hang until their own time-out
            self.abandon()
            secs = self._timeout.total_seconds()
            raise RankLostError(f'{what}; it waits at most {secs:.0f} s for them: {error}') from error


#: Made by :meth:`Collective.shared`, by their use; kept as long as the process group exists.
_SHARED: WeakKeyDictionary[dist.ProcessGroup, dict[str, Collective]] = WeakKeyDictionary()
