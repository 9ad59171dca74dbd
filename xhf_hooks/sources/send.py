"""From partitions to bytes, point to point: every rank sends its slices to the rank that writes them.

Each byte crosses the network once at most, where a gather gives every rank all of them. A round of the plan is one
message from each rank to each owner: the slices, cast, one after the other, without a header, for both sides know from
the plan what is in it. What every rank has whole, its owner reads by itself, which takes two fifths of the processor
time of having the other ranks' shares sent (2 and 4 ranks, one machine). In the background each rank sends its share of
that, too, so that training stops for the copy of a share only.

Messages go through host memory and gloo, whatever the device. nccl could take them from GPU to GPU, but its rules are
not ours: where a rank dies, nccl's watchdog ends the others, which must get an error instead; all ranks must take part
in a group's first operation; and none of it was run on a GPU. That way is there for tools/gpu_check.py to try.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import accumulate

import numpy as np
import torch

from xhf_hooks.concurrency.buffer_pool import BufferPool
from xhf_hooks.concurrency.host_snapshot import host_memory
from xhf_hooks.distributed.collective import Collective
from xhf_hooks.errors import TensorError
from xhf_hooks.format.dtypes import ToHost
from xhf_hooks.planning.types import Chunk, Round, SavePlan
from xhf_hooks.sources.local_shards import Slice
from xhf_hooks.telemetry.memory import MemoryMeter

#: Ranks agree once in so many rounds; a rank that has failed sends and receives on, for the others, until then.
ROUNDS_PER_AGREEMENT = 64
#: Of a round: one is received into while others wait for the disk.
_BUFFERS = 3

#: This rank's slices in a round (its number) that an owner (its rank) gets, in the order of the message.
ReadSlices = Callable[[int, int], Iterable[Slice]]

_NOTHING = np.empty(0, np.uint8)


class SliceSender:
    """Sends this rank's slices, and receives those that it writes. Runs on: all ranks, in step.

    Before each round ranks wait for each other, on gloo: what an owner has not yet handed to its disk, nobody sends
    it more of than one round, and what waits for the disk is no collective of the device.

    Args:
        read: Without communication. What it raises is remembered.
        device: Where messages are packed and received: the CPU, or, to try it, a device that has a backend in the
            run's own group.

    Attributes:
        overflows: Finite elements that became infinite in what was sent.
    """

    def __init__(
        self,
        plan: SavePlan,
        read: ReadSlices,
        collective: Collective,
        *,
        meter: MemoryMeter,
        to_host: ToHost,
        device: torch.device,
    ) -> None:
        self._rounds, self._read, self._collective = plan.rounds, read, collective
        self._meter, self._to_host, self._device = meter, to_host, device
        self._rank = collective.rank
        self._outgoing = [at_once.outgoing(self._rank) for at_once in self._rounds]
        self.overflows = 0

    def chunks(self) -> Generator[Chunk, None, None]:
        """What this rank writes, of its own slices and others'.

        While the chunks of a round are handed out, the next round is on its way.

        Raises:
            AgreedError: Some rank failed; or has a slice that is not what the plan says.
            RankLostError: A rank did not answer.
        """
        if not self._rounds:
            return
        try:
            self._make_buffers()
        except Exception as error:  # no memory; known to all before the first message
            self._collective.remember('send', error)
        outgoing = {} if self._collective.is_failing else self._pack(0)
        arrived: dict[int, np.ndarray] = {}
        for number, at_once in enumerate(self._rounds):
            if number % ROUNDS_PER_AGREEMENT == 0:
                self._collective.agree('send')
            else:
                self._collective.wait('send')
            if number == 0 and self._device.type != 'cpu':
                self._collective.connect_device(self._device)
            incoming, room = self._room_for(at_once)
            finish = self._collective.post(outgoing, incoming, 'send')
            yield from self._written_here(number - 1, arrived)
            outgoing = self._pack(number + 1)
            finish()
            arrived = self._on_host(incoming, room)
            self._meter.sample()
        yield from self._written_here(len(self._rounds) - 1, arrived)
        self._collective.agree('send')

    def _make_buffers(self) -> None:
        incoming = max(at_once.most_incoming_nbytes(self._rank) for at_once in self._rounds)
        outgoing = max(sum(sizes.values()) for sizes in self._outgoing)
        self._pool = BufferPool(incoming, _BUFFERS)
        self._last_room = self._pool.take()
        if self._device.type == 'cpu':
            self._packed = [host_memory(outgoing) for _ in range(2)]
        else:
            self._packed = [torch.empty(outgoing, dtype=torch.uint8, device=self._device) for _ in range(2)]
            self._landing = torch.empty(incoming, dtype=torch.uint8, device=self._device)

    def _pack(self, number: int) -> dict[int, torch.Tensor]:
        """This rank's messages of a round; once it has failed, of any content."""
        if number == len(self._rounds):
            return {}
        buffer, messages, end = self._packed[number % 2], {}, 0
        for owner, nbytes in self._outgoing[number].items():
            start, end = end, end + nbytes
            messages[owner] = buffer[start:end]
            if self._collective.is_failing:
                continue
            try:
                self._fill(messages[owner], self._read(number, owner))
            except Exception as error:
                self._collective.remember('send', error)
        return messages

    def _fill(self, message: torch.Tensor, slices: Iterable[Slice]) -> None:
        end = 0
        for found in slices:
            flat = found.elements.detach().contiguous().reshape(-1).view(torch.uint8)
            start, end = end, end + flat.numel()
            message[start:end].copy_(flat)
            self.overflows += found.overflows
        if end != len(message):
            raise TensorError(f'expected slices of {len(message)} bytes for a message, found {end}')

    def _room_for(self, at_once: Round) -> tuple[dict[int, torch.Tensor], np.ndarray]:
        """Where the others' messages of a round arrive, and the host memory in which they will be."""
        sizes = at_once.incoming(self._rank)
        if not sizes:
            return {}, _NOTHING
        try:
            self._last_room = self._pool.take()
        except Exception as error:  # the messages come all the same; the save has failed, so they may come over others
            self._collective.remember('send', error)
        room = self._last_room
        landing = torch.from_numpy(room) if self._device.type == 'cpu' else self._landing
        ends = list(accumulate(sizes.values()))
        places = zip(sizes.items(), ends, strict=True)
        return {sender: landing[end - nbytes : end] for (sender, nbytes), end in places}, room

    def _on_host(self, incoming: Mapping[int, torch.Tensor], room: np.ndarray) -> dict[int, np.ndarray]:
        """The messages, in host memory."""
        nbytes = sum(len(message) for message in incoming.values())
        if self._device.type != 'cpu' and nbytes:
            torch.from_numpy(room)[:nbytes].copy_(self._landing[:nbytes])
        ends = list(accumulate(len(message) for message in incoming.values()))
        return {
            sender: room[end - len(message) : end]
            for (sender, message), end in zip(incoming.items(), ends, strict=True)
        }

    def _written_here(self, number: int, arrived: Mapping[int, np.ndarray]) -> Iterator[Chunk]:
        """The chunks of a round, those of one tensor in their order: they are one receipt."""
        if number < 0 or self._collective.is_failing:
            return
        portions = self._rounds[number].for_owner(self._rank)
        try:
            own = iter(self._read(number, self._rank) if portions else ())
            done = dict.fromkeys(arrived, 0)
            for portion in portions:
                for holder in portion.holders:
                    held = portion.held_by(holder)
                    nbytes = len(held) * portion.width
                    if holder == self._rank:
                        yield from self._own_chunks(own, nbytes)
                    elif nbytes:
                        start, done[holder] = done[holder], done[holder] + nbytes
                        data = arrived[holder][start : start + nbytes].data
                        yield Chunk(portion.placement, data, held.start * portion.width)
        except Exception as error:
            self._collective.remember('send', error)

    def _own_chunks(self, own: Iterator[Slice], nbytes: int) -> Iterator[Chunk]:
        """So many bytes of this rank's slices: they come in parts."""
        while nbytes > 0:
            found = next(own).chunk(self._to_host)
            nbytes -= found.data.nbytes
            yield found
