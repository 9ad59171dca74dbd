"""Gives the chunks that a rank writes: its own slices, received ones, gathered tensors; of the live model or a copy.

Slices that another rank writes are sent to it, point to point.

Each byte crosses the network at most once, whereas a gather sends every byte to every rank. A round of the plan is one
message from each rank to each owner: the cast slices, concatenated, without a header, since both sides know the plan.
Tensors that every rank has whole are not sent: their owner reads its own copy, which takes two fifths of the processor
time (2 and 4 ranks, one machine). In background saves they are sent as well, a share by each rank, so that training
stops only while each rank copies its share.

Messages pass through host memory and gloo, whatever the device: if a rank dies, NCCL's watchdog kills the other ranks,
which should get an error instead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, takewhile

import torch

from xhf_hooks.errors import TensorError
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.types import Chunk, Placement
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.sources.base import Source
from xhf_hooks.sources.copied import chunks_of
from xhf_hooks.sources.host_memory import BufferPool, SnapshotMemory, host_memory, synchronize
from xhf_hooks.sources.read import SliceReader, ToHost, in_host_memory, in_place_and_gathered

#: Ranks vote once per this many rounds. Until then a rank that has failed keeps sending and receiving.
ROUNDS_PER_VOTE = 64
#: Receive buffers: one is being filled while the other two wait for the disk. A buffer is free again once no chunk
#: refers to it; if none is free, the pool makes another one, and does not wait.
_BUFFERS = 3

#: Called with a round, an owner, and a function that puts elements into host memory and returns them as a chunk; reads
#: this rank's slices for that owner, in the order of the message.
ReadSlices = Callable[[int, int, ToHost], Iterable[Chunk]]


class SliceSender:
    """Sends this rank's slices and receives those that it writes. Runs on: all ranks, in step.

    Ranks wait for each other on gloo before each round, so that an owner with a slow disk is at most one round behind,
    and no device collective waits for a disk.

    Args:
        read: Reads slices without communication. Its errors are remembered.
        pinned: Whether the slices are on a device, so that buffers in pinned memory are faster.
    """

    def __init__(self, plan: SavePlan, read: ReadSlices, collective: Collective, *, pinned: bool = False) -> None:
        self._rounds = plan.rounds
        self._read = read
        self._collective = collective
        self._pinned = pinned
        self._rank = collective.rank
        # Allocated later, inside a stage, so that all ranks learn of a lack of memory
        self._pool = BufferPool(0, 0)
        self._receive_buffer = host_memory(0)
        self._packed: list[torch.Tensor] = []

    def chunks(self) -> Generator[Chunk, None, None]:
        """Yield what this rank writes, from its own slices and those of other ranks. Runs on: all ranks, to the end.

        Failures here are remembered, and so must be those of the caller.

        Raises:
            AgreedError: A rank failed, or has a slice that does not match the plan.
            RankLostError: A rank did not answer.
        """
        for start in range(0, len(self._rounds), ROUNDS_PER_VOTE):
            yield from self._exchanged(range(start, min(start + ROUNDS_PER_VOTE, len(self._rounds))))
        if self._rounds:
            self._collective.raise_if_any_failed('send')

    def _exchanged(self, numbers: range) -> Generator[Chunk, None, None]:
        """The chunks of some rounds. While those of one round are written, the next round is being sent.

        After a failure, messages still arrive, but their content does not matter.
        """
        with self._collective.stage('send'):  # all ranks learn of a lack of memory before the first message
            if not self._packed:
                self._make_buffers()
            outgoing = [self._rounds[number].outgoing(self._rank) for number in numbers]
            incoming = [self._rounds[number].incoming(self._rank) for number in numbers]
            self._pack(numbers[0], outgoing[0])
        arrived: dict[int, torch.Tensor] = {}
        for number, sent, received in zip(numbers, outgoing, incoming, strict=True):
            if number != numbers[0]:
                self._collective.wait('send')
            with self._collective.remembering('send'):
                if received:
                    self._receive_buffer = torch.from_numpy(self._pool.take())
            packed = self._packed[number % 2][: sum(sent.values())].split([*sent.values()])
            parts = self._receive_buffer[: sum(received.values())].split([*received.values()])
            messages = dict(zip(received, parts, strict=True))
            finish = self._collective.post(dict(zip(sent, packed, strict=True)), messages, 'send')
            with self._collective.remembering('send'):
                if number != numbers[0]:
                    yield from self._written_here(number - 1, arrived)
                if number != numbers[-1]:
                    self._pack(number + 1, outgoing[number + 1 - numbers[0]])
            finish()
            arrived = messages
        with self._collective.remembering('send'):
            yield from self._written_here(numbers[-1], arrived)

    def _make_buffers(self) -> None:
        self._pool = BufferPool(max(one_round.most_incoming_nbytes(self._rank) for one_round in self._rounds), _BUFFERS)
        self._receive_buffer = torch.from_numpy(self._pool.take())  # used if a later take() fails
        most_outgoing = max(sum(one_round.outgoing(self._rank).values()) for one_round in self._rounds)
        self._packed = [host_memory(most_outgoing, pinned=self._pinned) for _ in range(2)]

    def _pack(self, number: int, nbytes_of: Mapping[int, int]) -> None:
        """Fill this rank's messages of a round."""
        buffer, end = self._packed[number % 2], 0
        for owner, nbytes in nbytes_of.items():
            start, end = end, end + nbytes
            if not self._collective.has_remembered_error:
                _fill(buffer[start:end], partial(self._read, number, owner))

    def _written_here(self, number: int, arrived: Mapping[int, torch.Tensor]) -> Iterator[Chunk]:
        """The chunks of a round, unless a rank has failed that this rank knows of."""
        if self._collective.has_remembered_error:
            return
        yield from self._read(number, self._rank, in_host_memory)
        n_read = dict.fromkeys(arrived, 0)  # bytes of each message
        for sender, portion, elements in self._rounds[number].arriving(self._rank):
            start, n_read[sender] = n_read[sender], n_read[sender] + len(elements) * portion.width
            data = arrived[sender][start : n_read[sender]].numpy().data
            yield Chunk(portion.placement, data, elements.start * portion.width)


def _fill(message: torch.Tensor, read: Callable[[ToHost], Iterable[Chunk]]) -> None:
    """Read slices into a message, one after the other."""
    end, devices = 0, set()

    def append(placement: Placement, elements: torch.Tensor, start: int = 0) -> Chunk:
        nonlocal end
        flat = elements.detach().contiguous().reshape(-1).view(torch.uint8)
        part = message[end : end + flat.numel()]
        part.copy_(flat, non_blocking=True)
        end += flat.numel()
        devices.add(flat.device)
        return Chunk(placement, part.numpy().data, start)

    for _ in read(append):
        pass
    synchronize(devices)
    if end != len(message):
        raise TensorError(f'expected a message of {len(message)} bytes of slices, found {end}')


def live_chunks(plan: SavePlan, source: Source, collective: Collective) -> Generator[Chunk, None, None]:
    """Yield what this rank writes. Runs on: all ranks, to the end.

    Failures here are remembered, and so must be those of the caller.

    Raises:
        AgreedError: A rank failed.
        RankLostError: A rank did not answer.
    """
    reader = SliceReader(source)

    def read(number: int, owner: int, to_host: ToHost) -> Iterator[Chunk]:
        return reader.read(plan.rounds[number].message(collective.rank, owner), to_host)

    with torch.no_grad():
        yield from SliceSender(plan, read, collective, pinned=source.is_on_a_device).chunks()
        yield from in_place_and_gathered(plan, source, collective, in_host_memory)
    yield from _copied(plan, collective)


def _copied(plan: SavePlan, collective: Collective) -> Generator[Chunk, None, None]:
    """The chunks that this rank copies from the base model, unless it knows that a rank has failed."""
    own = (one for one in plan.copied if one.placement.owner == collective.rank)
    with collective.remembering('read'):
        yield from takewhile(lambda _: not collective.has_remembered_error, chain.from_iterable(map(chunks_of, own)))


class Snapshot:
    """A copy in host memory of the elements that this rank writes or sends, all from the same moment.

    Args:
        plan: The plan of the save.
        slices: This rank's slices, by round and owner.
        chunks: What this rank writes that is in no round: its slices in place, and gathered tensors.
    """

    def __init__(self, plan: SavePlan, slices: dict[tuple[int, int], list[Chunk]], chunks: list[Chunk]) -> None:
        self._plan = plan
        self._slices = slices
        self._chunks = chunks

    @classmethod
    def take(cls, plan: SavePlan, source: Source, memory: SnapshotMemory, collective: Collective) -> Snapshot:
        """Copy the elements. Runs on: all ranks.

        Args:
            memory: Holds the copy until the next snapshot is taken.

        Raises:
            AgreedError: A rank failed.
        """
        slices: dict[tuple[int, int], list[Chunk]] = {}
        chunks: list[Chunk] = []

        def hold(placement: Placement, elements: torch.Tensor, start: int = 0) -> Chunk:
            # Aligned in memory as in the file, so that direct writes need no second copy
            return in_host_memory(placement, memory.hold(elements, placement.offset + start), start)

        with torch.no_grad(), collective.stage('snapshot'):
            memory.clear()
            reader = SliceReader(source)
            for number, one_round in enumerate(plan.rounds):
                for owner in one_round.owners:
                    slices[number, owner] = [*reader.read(one_round.message(collective.rank, owner), hold)]
        with collective.stage('snapshot'):
            chunks += in_place_and_gathered(plan, source, collective, hold)
            memory.synchronize()
        return cls(plan, slices, chunks)

    def chunks(self, collective: Collective) -> Generator[Chunk, None, None]:
        """Yield what this rank writes, as :func:`live_chunks` does. Runs on: all ranks."""
        with collective.remembering('read'):
            yield from self._chunks
        yield from SliceSender(self._plan, self._read_copy, collective).chunks()
        yield from _copied(self._plan, collective)

    def _read_copy(self, number: int, owner: int, to_host: ToHost) -> Iterator[Chunk]:
        for chunk in self._slices.get((number, owner), []):
            yield to_host(chunk.placement, torch.frombuffer(chunk.data, dtype=torch.uint8), chunk.start)
