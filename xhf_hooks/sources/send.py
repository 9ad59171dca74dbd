"""Sends each rank's slices to the rank that writes them, point to point.

Each byte crosses the network at most once, whereas a gather sends every byte to every rank. A round of the plan is one
message from each rank to each owner: the cast slices, concatenated, without a header, since both sides know the plan.
Tensors that every rank has whole are not sent: their owner reads its own copy, which takes two fifths of the processor
time (2 and 4 ranks, one machine). In background saves they are sent as well, a share by each rank, so that training
stops only while each rank copies its share.

Messages pass through host memory and gloo, whatever the device. NCCL could send them from GPU to GPU, but if a rank
dies, NCCL's watchdog kills the others, which should get an error instead; NCCL requires all ranks to take part in a
group's first operation; and that path has not run on a GPU. tools/gpu_check.py can try it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import accumulate

import numpy as np
import torch

from xhf_hooks.collective import Collective
from xhf_hooks.errors import TensorError
from xhf_hooks.format.dtypes import ToHost
from xhf_hooks.host_memory import BufferPool, MemoryMeter, host_memory
from xhf_hooks.planning.types import Chunk, Round, SavePlan
from xhf_hooks.sources.local_shards import Slice

#: Ranks agree once per this many rounds. Until then a rank that has failed keeps sending and receiving.
ROUNDS_PER_AGREEMENT = 64
#: Receive buffers: one is being filled while the others wait for the disk.
_BUFFERS = 3

#: Called with a round and an owner; returns this rank's slices for that owner, in the order of the message.
ReadSlices = Callable[[int, int], Iterable[Slice]]

_NOTHING = np.empty(0, np.uint8)


class SliceSender:
    """Sends this rank's slices and receives those that it writes. Runs on: all ranks, in step.

    Ranks wait for each other on gloo before each round, so that an owner with a slow disk is at most one round behind,
    and no device collective waits for a disk.

    Args:
        read: Returns this rank's slices, without communication. Its errors are remembered.
        device: Where messages are packed and received: the CPU or, as an experiment, a device that has a backend in
            the run's own process group.

    Attributes:
        overflows: Number of finite elements that became infinite in what was sent.
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
        """Yield what this rank writes, from its own slices and those of others.

        While the chunks of one round are written, the next round is being sent.

        Raises:
            AgreedError: A rank failed, or has a slice that does not match the plan.
            RankLostError: A rank did not answer.
        """
        if not self._rounds:
            return
        try:
            self._make_buffers()
        except Exception as error:  # out of memory; all ranks learn of it before the first message
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
        """This rank's messages of a round. After a failure their content does not matter."""
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
            raise TensorError(f'expected a message of {len(message)} bytes of slices, found {end}')

    def _room_for(self, at_once: Round) -> tuple[dict[int, torch.Tensor], np.ndarray]:
        """Buffers for the incoming messages of a round, and the host memory for their content."""
        sizes = at_once.incoming(self._rank)
        if not sizes:
            return {}, _NOTHING
        try:
            self._last_room = self._pool.take()
        except Exception as error:  # the messages still arrive; the save has failed, so they may overwrite each other
            self._collective.remember('send', error)
        room = self._last_room
        landing = torch.from_numpy(room) if self._device.type == 'cpu' else self._landing
        ends = list(accumulate(sizes.values()))
        places = zip(sizes.items(), ends, strict=True)
        return {sender: landing[end - nbytes : end] for (sender, nbytes), end in places}, room

    def _on_host(self, incoming: Mapping[int, torch.Tensor], room: np.ndarray) -> dict[int, np.ndarray]:
        """The received messages, in host memory."""
        nbytes = sum(len(message) for message in incoming.values())
        if self._device.type != 'cpu' and nbytes:
            torch.from_numpy(room)[:nbytes].copy_(self._landing[:nbytes])
        ends = list(accumulate(len(message) for message in incoming.values()))
        return {
            sender: room[end - len(message) : end]
            for (sender, message), end in zip(incoming.items(), ends, strict=True)
        }

    def _written_here(self, number: int, arrived: Mapping[int, np.ndarray]) -> Iterator[Chunk]:
        """The chunks of a round. Those of one tensor are in order, since they share a receipt."""
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
        """The next ``nbytes`` bytes of this rank's slices, which come in parts."""
        while nbytes > 0:
            found = next(own).chunk(self._to_host)
            nbytes -= found.data.nbytes
            yield found
