"""What a rank writes, from the live model or from a copy of it: its own slices, received ones, gathered tensors.

Slices that another rank writes are sent to it, point to point.

Each byte crosses the network at most once, whereas a gather sends every byte to every rank. A round of the plan is one
message from each rank to each owner: the cast slices, concatenated, without a header, since both sides know the plan.
Tensors that every rank has whole are not sent: their owner reads its own copy, which takes two fifths of the processor
time (2 and 4 ranks, one machine). In background saves they are sent as well, a share by each rank, so that training
stops only while each rank copies its share.

Messages pass through host memory and gloo, whatever the device: if a rank dies, NCCL's watchdog kills the others, which
should get an error instead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain

import torch

from xhf_hooks.collective import Collective
from xhf_hooks.errors import TensorError
from xhf_hooks.planning.types import Chunk, Round, SavePlan
from xhf_hooks.sources.base import Source
from xhf_hooks.sources.read import Slice, SliceReader, unsent_slices
from xhf_hooks.system.memory import BufferPool, SnapshotMemory, host_memory, synchronize

#: Ranks agree once per this many rounds. Until then a rank that has failed keeps sending and receiving.
ROUNDS_PER_AGREEMENT = 64
#: Receive buffers: one is being filled while the others wait for the disk.
_BUFFERS = 3

#: Called with a round and an owner; returns this rank's slices for that owner, in the order of the message.
ReadSlices = Callable[[int, int], Iterable[Slice]]


class SliceSender:
    """Sends this rank's slices and receives those that it writes. Runs on: all ranks, in step.

    Ranks wait for each other on gloo before each round, so that an owner with a slow disk is at most one round behind,
    and no device collective waits for a disk.

    Args:
        read: Returns this rank's slices, without communication. Its errors are remembered.
        pinned: They are on a device.
    """

    def __init__(self, plan: SavePlan, read: ReadSlices, collective: Collective, *, pinned: bool = False) -> None:
        self._rounds, self._read, self._collective, self._pinned = plan.rounds, read, collective, pinned
        self._rank = collective.rank
        self._outgoing = [at_once.outgoing(self._rank) for at_once in self._rounds]

    def chunks(self) -> Generator[Chunk, None, None]:
        """Yield what this rank writes, from its own slices and those of others.

        While the chunks of one round are written, the next round is being sent.

        Raises:
            AgreedError: A rank failed, or has a slice that does not match the plan.
            RankLostError: A rank did not answer.
        """
        if not self._rounds:
            return
        with self._collective.remembering('send'):  # out of memory; all ranks learn of it before the first message
            self._make_buffers()
        outgoing = {} if self._collective.is_failing else self._pack(0)
        arrived: dict[int, torch.Tensor] = {}
        for number, at_once in enumerate(self._rounds):
            if number % ROUNDS_PER_AGREEMENT == 0:
                self._collective.agree('send')
            else:
                self._collective.wait('send')
            incoming = self._room_for(at_once)
            finish = self._collective.post(outgoing, incoming, 'send')
            yield from self._written_here(number - 1, arrived)
            outgoing = self._pack(number + 1)
            finish()
            arrived = incoming
        yield from self._written_here(len(self._rounds) - 1, arrived)
        self._collective.agree('send')

    def _make_buffers(self) -> None:
        self._pool = BufferPool(max(at_once.most_incoming_nbytes(self._rank) for at_once in self._rounds), _BUFFERS)
        self._last_room = self._pool.take()
        most_outgoing = max(sum(sizes.values()) for sizes in self._outgoing)
        self._packed = [host_memory(most_outgoing, pinned=self._pinned) for _ in range(2)]

    def _pack(self, number: int) -> dict[int, torch.Tensor]:
        """This rank's messages of a round. After a failure their content does not matter."""
        if number == len(self._rounds):
            return {}
        buffer, messages, end = self._packed[number % 2], {}, 0
        for owner, nbytes in self._outgoing[number].items():
            start, end = end, end + nbytes
            messages[owner] = buffer[start:end]
            if self._collective.is_failing:
                continue
            with self._collective.remembering('send'):
                _fill(messages[owner], self._read(number, owner))
        return messages

    def _room_for(self, at_once: Round) -> dict[int, torch.Tensor]:
        """Room for the incoming messages of a round."""
        sizes = at_once.incoming(self._rank)
        if not sizes:
            return {}
        # After a failure the messages still arrive; the save has failed, so they may overwrite each other
        with self._collective.remembering('send'):
            self._last_room = self._pool.take()
        used = torch.from_numpy(self._last_room)[: sum(sizes.values())]
        return dict(zip(sizes, used.split(list(sizes.values())), strict=True))

    def _written_here(self, number: int, arrived: Mapping[int, torch.Tensor]) -> Iterator[Chunk]:
        """The chunks of a round."""
        if number < 0 or self._collective.is_failing:
            return
        with self._collective.remembering('send'):
            for own in self._read(number, self._rank):
                yield own.chunk()
            done = dict.fromkeys(arrived, 0)
            for portion in self._rounds[number].for_owner(self._rank):
                for sender in portion.holders:
                    held = portion.held_by(sender)
                    if held and sender != self._rank:
                        start, done[sender] = done[sender], done[sender] + len(held) * portion.width
                        data = arrived[sender][start : done[sender]].numpy().data
                        yield Chunk(portion.placement, data, held.start * portion.width)


def _fill(message: torch.Tensor, slices: Iterable[Slice]) -> None:
    end, devices = 0, set()
    for found in slices:
        flat = found.elements.detach().contiguous().reshape(-1).view(torch.uint8)
        start, end = end, end + flat.numel()
        message[start:end].copy_(flat, non_blocking=True)
        devices.add(flat.device)
    synchronize(devices)
    if end != len(message):
        raise TensorError(f'expected a message of {len(message)} bytes of slices, found {end}')


@contextmanager
def live_chunks(plan: SavePlan, source: Source, collective: Collective) -> Iterator[Iterator[Chunk]]:
    """Yield what this rank writes. All ranks enter and leave together, whatever happens inside."""
    reader = SliceReader(source)

    def read(number: int, owner: int) -> Iterator[Slice]:
        return reader.read(plan.rounds[number].message(collective.rank, owner))

    with (
        closing(SliceSender(plan, read, collective, pinned=source.is_on_a_device).chunks()) as sent,
        unsent_slices(plan, source, collective) as others,
    ):
        yield chain(sent, map(Slice.chunk, others))  # which keeps no slice while the next bucket is gathered


class Snapshot:
    """A copy in host memory of what this rank writes and of the slices that it sends, all from the same moment.

    Runs on: all ranks, every method.

    Raises:
        AgreedError: A rank failed.
    """

    def __init__(self, plan: SavePlan, source: Source, memory: SnapshotMemory, collective: Collective) -> None:
        self._plan = plan
        self._slices: dict[tuple[int, int], list[Slice]] = {}
        memory.clear()

        def held(found: Slice) -> Slice:
            return replace(found, elements=memory.hold(found.elements, found.placement.offset + found.start))

        reader = SliceReader(source)
        with unsent_slices(plan, source, collective) as others, collective.stage('snapshot'):
            for number, at_once in enumerate(plan.rounds):
                for owner in at_once.owners:
                    sent = reader.read(at_once.message(collective.rank, owner))
                    self._slices[number, owner] = [held(found) for found in sent]
            self._chunks = [held(found).chunk() for found in others]
            memory.synchronize()

    @contextmanager
    def chunks(self, collective: Collective) -> Iterator[Iterator[Chunk]]:
        """Yield what this rank writes."""
        sender = SliceSender(self._plan, lambda *key: self._slices.get(key, []), collective)
        with closing(sender.chunks()) as sent:
            yield chain(self._chunks, sent)
