"""What a rank writes, from the live model or from a copy of it: its own slices, received ones, gathered tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain

from xhf_hooks.collective import Collective
from xhf_hooks.host_memory import SnapshotMemory
from xhf_hooks.planning.types import Chunk, SavePlan
from xhf_hooks.sources.base import Source
from xhf_hooks.sources.read import Slice, SliceReader, unsent_slices
from xhf_hooks.sources.send import SliceSender


@contextmanager
def live_chunks(plan: SavePlan, source: Source, collective: Collective) -> Iterator[Iterator[Chunk]]:
    """Yield what this rank writes. All ranks enter and leave together, whatever happens inside."""
    reader = SliceReader(source)

    def read(number: int, owner: int) -> Iterator[Slice]:
        return reader.read(plan.rounds[number].message(collective.rank, owner))

    with (
        closing(SliceSender(plan, read, collective).chunks()) as sent,
        unsent_slices(plan, source, collective) as others,
    ):
        yield chain(sent, (found.chunk() for found in others))


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
