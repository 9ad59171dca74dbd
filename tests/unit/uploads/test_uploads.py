"""Uploads of saves in one process: what is sent, what is not sent again, what is given up, what failures do."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers.tiny_checkpoint import commit_one, iteration
from xhf_hooks.commit.checkpoint_folder import CheckpointFolder
from xhf_hooks.commit.kept_folder import KeptFolder
from xhf_hooks.distributed.collective import Collective
from xhf_hooks.errors import StoreError, TargetError
from xhf_hooks.stores import ObjectInfo, open_store
from xhf_hooks.stores.publication import read_pointer
from xhf_hooks.stores.store_lock import StoreLock
from xhf_hooks.telemetry.log import RunLog
from xhf_hooks.uploads import run_uploads, upload_thread
from xhf_hooks.uploads.file_upload import FileUpload
from xhf_hooks.uploads.job import UploadJob
from xhf_hooks.uploads.run_uploads import RunUploads
from xhf_hooks.uploads.sharing import share_out
from xhf_hooks.uploads.to_store import StoreDestination

pytestmark = pytest.mark.modern_only


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(StoreLock, 'settle_secs', 0.0)
    monkeypatch.setattr(upload_thread, '_FIRST_PAUSE_SECS', 0.01)
    monkeypatch.setattr(upload_thread, '_LEAST_POLL_SECS', 0.01)
    monkeypatch.setattr(upload_thread.UploadThread, 'patience_secs', 5.0)


class Run:
    """A run of one process that uploads its saves."""

    def __init__(self, parent: Path, log: logging.Logger, max_keep: int = -1) -> None:
        self.store = open_store(f'memory://{uuid.uuid4().hex}/run')
        self.destination = StoreDestination(self.store, 'hf_model', max_keep)
        self.folder = CheckpointFolder(parent / 'hf_model', 1)
        self.folder.claim()
        self.uploads = RunUploads(
            {'hf_model': self.destination},
            RunLog(log, 'test'),
            wait_secs=20.0,
            is_shared=True,
        )
        self.uploads.claim(0)

    def save(self, number: int) -> None:
        commit_one(self.folder, number)
        self.uploads.offer(self.folder.final, iteration(number), Collective())

    @property
    def newest(self) -> str | None:
        pointer = read_pointer(self.store, 'hf_model')
        return None if pointer is None else pointer.newest

    def prefixes(self) -> list[str]:
        return sorted({key.partition('/')[0] for key in self.store.list() if '/' in key})


@pytest.fixture
def run(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    made = Run(tmp_path, logging.getLogger('uploads'))
    yield made
    made.uploads.end()
    made.folder.release()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith('xhf-')]


def kept(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if '.kept-' in path.name]


def test_a_save_is_uploaded_while_the_next_is_made(run, tmp_path):
    for number in (1, 2):
        run.save(number)
        expected = {path.name: path.read_bytes() for path in run.folder.final.iterdir()}
        run.uploads.wait()
        assert run.newest == f'hf_model_iter_{number}'
        stored = run.store.list(f'{run.newest}/')
        assert {key.rpartition('/')[2]: run.store.get(key) for key in stored} == expected
    assert kept(tmp_path) == [] and run.prefixes() == ['hf_model_iter_1', 'hf_model_iter_2']


def test_the_next_file_is_sent_while_one_is_made_visible(run, monkeypatch):
    """Each answer to the last request of a file, but that of the last, waits for bytes of the next."""
    commit_one(run.folder, 1)
    n_files = len([*run.folder.final.iterdir()]) - 1  # the manifest goes another way
    create, made, waited = run.store.create, [], []
    next_one = [threading.Event() for _ in range(n_files + 1)]

    def note(key, *args, **options):
        stored, number = create(key, *args, **options), len(made)
        made.append(key)
        next_one[number].set()
        if len(made) < n_files:
            finish = stored._parts.finish

            def wait(*rest):
                if next_one[number + 1].wait(20.0):
                    waited.append(key)
                return finish(*rest)

            stored._parts.finish = wait
        return stored

    monkeypatch.setattr(run.store, 'create', note)
    run.uploads.offer(run.folder.final, iteration(1), Collective())
    run.uploads.wait()
    assert run.newest == 'hf_model_iter_1' and len(made) == n_files > 2 and sorted(waited) == sorted(made[:-1])


def test_its_threads_give_way_to_training(run):
    run.save(1)
    run.uploads.wait()
    thread = run.uploads._thread
    for one in (thread._thread, *thread._senders._threads):
        assert os.getpriority(os.PRIO_PROCESS, one.native_id) > os.getpriority(os.PRIO_PROCESS, 0)


class Away:
    """Lets the changes of a store fail, or wait, until it is told otherwise."""

    def __init__(self, store, monkeypatch):
        self.is_there, self.attempts = threading.Event(), threading.Semaphore(0)
        self.waits = False
        for name in ('put', 'create'):
            method = getattr(store, name)
            monkeypatch.setattr(store, name, lambda *args, method=method, **kw: self._ask(method, *args, **kw))

    def _ask(self, method, *args, **options):
        self.attempts.release()
        if self.waits:
            self.is_there.wait()
        if not self.is_there.is_set():
            raise StoreError('the store is away')
        return method(*args, **options)


def test_newest_wins_while_the_store_is_away(run, tmp_path, monkeypatch, caplog):
    away = Away(run.store, monkeypatch)
    run.save(1)
    away.attempts.acquire(), away.attempts.acquire()
    assert run.uploads._thread._jobs[0].is_failing
    for number in (2, 3, 4):
        run.save(number)
    assert len(kept(tmp_path)) <= 4
    away.is_there.set()
    run.uploads.wait()
    assert run.newest == 'hf_model_iter_4' and run.prefixes() == ['hf_model_iter_4']
    assert 'upload of iter_1' in caplog.text and 'the store is away' in caplog.text
    assert kept(tmp_path) == []


def test_what_a_cancelled_one_left_is_deleted_after_the_next_save_that_can(run, monkeypatch):
    away, asked = Away(run.store, monkeypatch), []
    abandon = run.destination.abandon

    def fails_once(job):
        asked.append(job.place)
        if len(asked) == 1:
            raise StoreError('the store is away')
        abandon(job)

    monkeypatch.setattr(run.destination, 'abandon', fails_once)
    run.save(1)
    away.attempts.acquire(), away.attempts.acquire()
    run.save(2)
    away.is_there.set()
    for number in (2, 3, 4):
        run.uploads.wait()
        assert run.newest == f'hf_model_iter_{number}'
        assert asked == ['hf_model_iter_1'] * min(number - 1, 2)
        if number < 4:
            run.save(number + 1)


def test_one_that_is_under_way_is_not_given_up(run, monkeypatch):
    away = Away(run.store, monkeypatch)
    away.waits = True
    run.save(1)
    away.attempts.acquire()
    run.save(2)
    run.save(3)
    away.is_there.set()
    run.uploads.wait()
    assert run.prefixes() == ['hf_model_iter_1', 'hf_model_iter_3'] and run.newest == 'hf_model_iter_3'


def test_the_end_waits_no_longer_than_told(run, tmp_path, monkeypatch, caplog):
    Away(run.store, monkeypatch)
    run.uploads._wait_secs = 0.2
    run.save(1)
    run.uploads.end()
    assert 'did not finish within exit_wait_secs=0.2 s' in caplog.text and 'not uploaded: 1 save;' in caplog.text
    assert kept(tmp_path) == []


def test_each_request_fails_once(run, monkeypatch):
    """And nothing that has arrived is sent again."""
    run.save(1)
    run.uploads.wait()
    failed: set[tuple] = set()
    sent: list[str] = []
    for name in ('put', 'get', 'info', 'list', 'delete', 'create'):
        method = getattr(run.store, name)

        def once(*args, name=name, method=method, **options):
            key = (name, str(args))
            if key not in failed and 'lock' not in str(args):
                failed.add(key)
                raise StoreError(f'{name} fails once')
            if name == 'create':
                sent.append(args[0])
            return method(*args, **options)

        monkeypatch.setattr(run.store, name, once)
    monkeypatch.setattr(run.store, 'checksums', lambda parts: {'sum'})
    info = run.store.info
    monkeypatch.setattr(
        run.store, 'info', lambda key: None if (found := info(key)) is None else ObjectInfo(found.nbytes, 'sum')
    )
    run.save(2)
    run.uploads.wait()
    monkeypatch.undo()
    assert run.newest == 'hf_model_iter_2' and len(failed) > 10
    assert len(run.store.list('hf_model_iter_2/')) == len(sent) + 1, 'each file once, and the manifest'


def test_damaged_files_are_not_uploaded(run, monkeypatch, caplog):
    commit_one(run.folder, 1)
    path = next(run.folder.final.glob('*.safetensors'))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    run.uploads.offer(run.folder.final, iteration(1), Collective())
    run.uploads.wait()
    assert run.newest is None and 'changed since the save' in caplog.text


def test_a_save_that_cannot_be_kept_is_not_uploaded(run, tmp_path, monkeypatch, caplog):
    """A full disk takes no folder; the save itself is good."""

    def full(folder):
        raise TargetError(f'{folder}: cannot be kept for readers: [Errno 28] No space left on device')

    with monkeypatch.context() as patched:
        patched.setattr(KeptFolder, 'keep', full)
        run.save(1)
    assert 'the save of iter_1 will not be uploaded' in caplog.text and 'No space left' in caplog.text
    run.save(2)
    run.uploads.wait()
    assert run.prefixes() == ['hf_model_iter_2']


def test_the_end_waits_for_no_store_that_hangs(run, monkeypatch):
    hangs = threading.Event()
    release = run.destination.release
    monkeypatch.setattr(run_uploads, '_RELEASE_SECS', 0.1)
    monkeypatch.setattr(run.destination, 'release', lambda: (hangs.wait(), release()))
    run.uploads.end()
    hangs.set()
    deadline = time.monotonic() + 20
    while 'hf_model.lock' in run.store.list() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 'hf_model.lock' not in run.store.list()


def test_what_other_ranks_do_not_upload_rank_0_does(run, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(upload_thread.UploadThread, 'patience_secs', 0.1)
    commit_one(run.folder, 1)
    folder = KeptFolder.keep(run.folder.final)
    job = UploadJob(1, 'hf_model', run.destination.new_place(iteration(1)), iteration(1), folder.path, 0, 3, folder)
    run.uploads._thread.add(job, [])
    run.uploads.wait()
    assert run.newest == 'hf_model_iter_1' and 'in place of other ranks' in caplog.text
    assert len(run.store.list('hf_model_iter_1/')) == len([*run.folder.final.iterdir()])


def test_a_rank_uploads_its_share_alone(run, tmp_path):
    commit_one(run.folder, 1)
    other = RunUploads(
        {'hf_model': StoreDestination(run.store, 'hf_model', -1)},
        RunLog(logging.getLogger('other'), 'test'),
        wait_secs=20.0,
        is_shared=True,
    )
    other.claim(1)
    job = UploadJob(1, 'hf_model', 'hf_model_iter_1', iteration(1), run.folder.final, 1, 2)
    other._thread.add(job, [])
    other.wait()
    there = {key.rpartition('/')[2] for key in run.store.list('hf_model_iter_1/')}
    assert there == {*job.share, '.xhf_writing'} and 0 < len(job.share) < len(job.manifest.files)
    other.end()


def test_a_forgotten_run_gives_its_place_back(tmp_path):
    made = Run(tmp_path, logging.getLogger('forgotten'))
    store = made.store
    made.uploads.end_forgotten()
    deadline = time.monotonic() + 20
    while store.get('hf_model.lock') is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.get('hf_model.lock') is None
    made.folder.release()


@pytest.mark.parametrize('n_ranks', [1, 2, 3, 8, 40])
def test_shares(n_ranks):
    files = {f'model-{number}': 5000 for number in range(16)} | {'config.json': 10, 'rest': 1}
    shares = share_out(files, n_ranks)
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name] for name in share) for share in shares]
    assert len(shares) == n_ranks and max(loads) - min(loads) <= 5000
    assert share_out(dict(reversed(files.items())), n_ranks) == shares


@pytest.mark.parametrize(
    ('found', 'sent', 'is_refused'),
    [('0a', '0a', False), ('0a', '0b', True), (None, '0a', False), ('0a', None, False), ('0a-2', '0a', False)],
)
def test_checksums_are_compared_where_both_are_known_and_of_one_kind(found, sent, is_refused, tmp_path):
    store, made = mock.MagicMock(), mock.MagicMock(nbytes=3, checksum=sent)
    store.info.return_value = ObjectInfo(3, found, None)
    with pytest.raises(StoreError, match='expected 3 bytes') if is_refused else contextlib.nullcontext():
        FileUpload(store, 'key', tmp_path / 'file', mock.MagicMock()).require_stored(made)
    assert store.delete.called == is_refused
