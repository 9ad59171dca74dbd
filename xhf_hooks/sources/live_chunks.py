"""Yields what a rank writes, from a live model or a snapshot: its own slices, received slices, gathered tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import chain, takewhile

import torch

from xhf_hooks.collective import Collective
from xhf_hooks.format.dtypes import ToHost, host_bytes
from xhf_hooks.host_memory import MemoryMeter, SnapshotMemory
from xhf_hooks.planning.types import Chunk, SavePlan
from xhf_hooks.sources.base import Source
from xhf_hooks.sources.gather import gather
from xhf_hooks.sources.local_shards import Slice, SliceReader, local_shards
from xhf_hooks.sources.send import SliceSender

_HOST = torch.device('cpu')


class ChunkStream:
    """The chunks that a rank writes; can be iterated once. Used by: one thread.

    Attributes:
        overflows: Number of finite elements that became infinite in what this rank has read so far, whoever writes it.
    """

    def __init__(self, chunks: Iterable[Chunk], sender: SliceSender) -> None:
        self._chunks, self._sender = chunks, sender
        self._overflows = 0

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            self._overflows += chunk.overflows
            yield chunk
            del chunk  # not kept while the next one is made

    @property
    def overflows(self) -> int:
        return self._overflows + self._sender.overflows


class Snapshot:
    """A copy in host memory of what this rank writes and of the slices that it sends, all from the same moment."""

    def __init__(self, plan: SavePlan) -> None:
        self._plan = plan
        self._chunks: list[Chunk] = []
        self._slices: dict[tuple[int, int], list[Slice]] = {}

    def take(self, live: LiveChunks, memory: SnapshotMemory, collective: Collective, meter: MemoryMeter) -> None:
        """Make the copy. Runs on: all ranks.

        Raises:
            AgreedError: A rank failed.
        """
        memory.clear()
        reader = live.reader()
        with (
            live.without_sending(collective, meter, memory.hold) as chunks,
            collective.stage('snapshot'),
        ):
            for number, at_once in enumerate(self._plan.rounds):
                for owner in at_once.owners:
                    found = reader.read(at_once.message(collective.rank, owner))
                    self._slices[number, owner] = [slice_.held_in(memory.hold) for slice_ in found]
            self._chunks = list(chunks)
            memory.synchronize()
        meter.sample()

    @contextmanager
    def opened(self, collective: Collective, meter: MemoryMeter) -> Iterator[ChunkStream]:
        """Yield what this rank writes. Runs on: all ranks."""
        sender = SliceSender(self._plan, self._read, collective, meter=meter, to_host=host_bytes, device=_HOST)
        with closing(sender.chunks()) as sent:
            yield ChunkStream(chain(self._chunks, sent), sender)

    def _read(self, number: int, owner: int) -> list[Slice]:
        return self._slices[number, owner]


class LiveChunks:
    """Reads what this rank writes and sends from the live model.

    Args:
        device: Where slices are packed before they are sent (sources/send.py).
    """

    def __init__(self, plan: SavePlan, source: Source, *, device: torch.device = _HOST) -> None:
        self._plan, self._source, self._device = plan, source, device

    def reader(self) -> SliceReader:
        """A reader of the slices that this rank sends."""
        return SliceReader(self._source)

    @contextmanager
    def opened(self, collective: Collective, meter: MemoryMeter) -> Iterator[ChunkStream]:
        """Yield what this rank writes. All ranks enter and leave together, whatever happens inside."""
        reader = self.reader()

        def read(number: int, owner: int) -> Iterator[Slice]:
            return reader.read(self._plan.rounds[number].message(collective.rank, owner))

        sender = SliceSender(self._plan, read, collective, meter=meter, to_host=host_bytes, device=self._device)
        with closing(sender.chunks()) as sent, self.without_sending(collective, meter, host_bytes) as others:
            yield ChunkStream(chain(sent, others), sender)

    @contextmanager
    def without_sending(self, collective: Collective, meter: MemoryMeter, to_host: ToHost) -> Iterator[Iterator[Chunk]]:
        """Yield all but the received slices. All ranks enter and leave together, whatever happens inside."""
        # Without buckets nothing is gathered, so the model need not be prepared
        with self._source.opened() if self._plan.buckets else nullcontext(), torch.no_grad():
            slices = local_shards(self._plan, self._source, meter=meter, to_host=to_host)
            gathered = gather(self._plan, self._source, collective, meter=meter, to_host=to_host)
            with closing(slices), closing(gathered):
                yield chain(takewhile(lambda _: not collective.is_failing, slices), gathered)
