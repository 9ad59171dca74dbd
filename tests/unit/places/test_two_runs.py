"""A run saves to a store while another one claims it: every order of their requests, none of which is conditional."""

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.helpers.ranks.launch import HANG_SECS
from tests.helpers.runs.tiny_checkpoint import commit_one
from tests.unit.places.test_store import prefixes
from xhf_hooks.errors import StoreError
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.integrity.manifest import parse_manifest
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.objects import Store
from xhf_hooks.places.store import StoredSaves, read_pointer

FIRST, SECOND = 'the earlier run', 'the later run'
#: Between numbers of requests that are tried; 1 tries all, for a minute.
STRIDE = 5


class InTurns:
    """Two threads whose requests alternate as an order says.

    Args:
        order: For each request, whose it is. What remains of a run that is not in the order comes at the end.
        look: Called after each request.
    """

    def __init__(self, order: Sequence[str], look: Callable[[], None]) -> None:
        self._order, self._look = list(order), look
        self._ended: set[str] = set()
        self._changed = threading.Condition()
        self.n_requests = dict.fromkeys((FIRST, SECOND), 0)

    def run(self, work: dict[str, Callable[[], Any]]) -> None:
        with ThreadPoolExecutor(len(work)) as threads:
            list(threads.map(self._work, work, work.values()))

    def request(self, run: str, send: Callable[[], Any]) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: self._whose_turn() in (run, None), HANG_SECS)
            self.n_requests[run] += 1
            if self._order:
                self._order.pop(0)
            try:
                return send()
            finally:
                self._look()
                self._changed.notify_all()

    def _whose_turn(self) -> str | None:
        while self._order and self._order[0] in self._ended:
            self._order.pop(0)
        return self._order[0] if self._order else None

    def _work(self, run: str, work: Callable[[], Any]) -> None:
        try:
            work()
        finally:
            with self._changed:
                self._ended.add(run)
                self._changed.notify_all()


class Place:
    """A store in which the earlier run has published a save and sent the files of the next one."""

    def __init__(self, manifest: bytes, max_keep: int, order: Sequence[str], may_name_deleted: bool = False) -> None:
        self._manifest, self._files = manifest, parse_manifest(manifest, '').files
        self._url, self._may_name_deleted = f'memory://{uuid.uuid4().hex}', may_name_deleted
        self.store = Store(self._url)
        self.store._fs.store.clear()  # of the place before
        self.runs = {run: StoredSaves(self._url, 'hf_model', max_keep) for run in (FIRST, SECOND)}
        self.published: dict[str, list[str]] = {FIRST: [], SECOND: []}
        first = self.runs[FIRST]
        first.claim()
        self.save(FIRST, 1)
        self._begun = self._send(FIRST, 2)
        self.turns = InTurns(order, self._look)
        for run, saves in self.runs.items():
            self._in_turns(run, saves.store)

    def _in_turns(self, run: str, store: Store) -> None:
        ask, has_begun = store._ask, run == FIRST

        def wait_and_ask(what: str, *args: Any, **more: Any) -> Any:
            nonlocal has_begun
            has_begun = has_begun or what == 'write'  # before its claim, the later run only looks
            if not has_begun:
                return ask(what, *args, **more)
            return self.turns.request(run, lambda: ask(what, *args, **more))

        store._ask = wait_and_ask

    def _send(self, run: str, number: int) -> str:
        saves = self.runs[run]
        prefix = saves.begin(f'iter_{number}', self._files)
        for name, record in self._files.items():
            saves.store.put(f'{prefix}/{name}', bytes(record.nbytes))
        return prefix

    def save(self, run: str, number: int) -> None:
        prefix = self._send(run, number)
        self.runs[run].publish(prefix, self._manifest)
        self.published[run].append(prefix)

    def publish(self) -> None:
        """What the earlier run does: publish what it has sent, and then its next save."""
        try:
            self.runs[FIRST].publish(self._begun, self._manifest)
            self.published[FIRST].append(self._begun)
            self.save(FIRST, 3)
        except StoreError as error:
            assert 'another run saves here since' in str(error)
        else:
            self.runs[FIRST].clean_at_end()

    def newest(self) -> str:
        """What the pointer names, which must be complete."""
        pointer = read_pointer(self.store, 'hf_model')
        sizes = self.store.sizes(pointer.newest)
        assert sizes.keys() == {*self._files, MANIFEST_NAME}, f'{pointer.newest} has only {[*sizes]}'
        assert pointer.newest == pointer.saves[-1]
        return pointer.newest

    def _look(self) -> None:
        if not self._may_name_deleted:
            self.newest()

    def check_end(self) -> None:
        """The later run has the place, and can save there; nothing else is left."""
        for number in (4, 5):
            self.save(SECOND, number)
            assert self.newest() == self.published[SECOND][-1]
        with pytest.raises(StoreError, match=r'another run saves here since 20.*set upload_to to another place'):
            self.save(FIRST, 6)
        self.runs[FIRST].clean_at_end()
        self.runs[SECOND].clean_at_end()
        assert self.newest() == self.published[SECOND][-1]
        assert prefixes(self.store) == {*read_pointer(self.store, 'hf_model').saves}
        assert not read_pointer(self.store, 'hf_model').unfinished


@pytest.fixture(scope='module')
def manifest(tmp_path_factory) -> bytes:
    folder = CheckpointFolder(tmp_path_factory.mktemp('local') / 'hf_model', 1)
    commit_one(folder, 1)
    return folder.newest_manifest()


def orders(n_first: int, n_second: int) -> Iterator[list[str]]:
    """All orders of so many requests."""
    for places in itertools.combinations(range(n_first + n_second), n_second):
        yield [SECOND if number in places else FIRST for number in range(n_first + n_second)]


def alone(manifest: bytes, max_keep: int, run: str) -> int:
    """How many requests a run makes if the other makes none."""
    place = Place(manifest, max_keep, [])
    place.turns.run({run: place.publish if run == FIRST else place.runs[run].claim})
    return place.turns.n_requests[run]


@pytest.mark.parametrize('max_keep', [1, 3])
def test_a_claim_at_every_point_of_a_publish(manifest, max_keep):
    """After each request the pointer names a complete save; then the later run goes on, and the earlier one stops."""
    n_claim = alone(manifest, max_keep, SECOND)
    n_publish = 20  # and the look at the claim of the next save
    assert alone(manifest, max_keep, FIRST) > n_publish
    for order in orders(n_publish, n_claim):
        place = Place(manifest, max_keep, order)
        place.turns.run({FIRST: place.publish, SECOND: place.runs[SECOND].claim})
        place.check_end()


@pytest.mark.parametrize('max_keep', [1, 3])
def test_a_publish_that_is_held_up_while_the_later_run_saves(manifest, max_keep):
    """At any request, for any time. Its last write may name what the later run has deleted, but not for long."""

    def live(place: Place) -> None:
        place.runs[SECOND].claim()
        for number in (2, 3):
            place.save(SECOND, number)

    for before in range(1, 21):
        for meanwhile in itertools.count(before % STRIDE, STRIDE):
            place = Place(manifest, max_keep, [FIRST] * before + [SECOND] * meanwhile + [FIRST] * 100, True)
            place.turns.run({FIRST: place.publish, SECOND: partial(live, place)})
            place.check_end()
            if meanwhile > place.turns.n_requests[SECOND]:
                break
