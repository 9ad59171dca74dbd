"""``on_saved_after='upload'``: the action runs for saves that are visible in the store, and for no others."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.unit.uploads.test_uploads import Away, Run, kept, quick  # noqa: F401
from xhf_hooks.commit.kept_folder import KeptFolder
from xhf_hooks.errors import StoreError, TargetError
from xhf_hooks.integrity.manifest import MANIFEST_NAME
from xhf_hooks.on_saved.after_saves import AfterSaves
from xhf_hooks.stores.store import Store
from xhf_hooks.telemetry.log import RunLog

pytestmark = pytest.mark.modern_only

SECS = 60.0


class Function:
    """Notes what is there when it is called, then waits until it may end."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, bool, bool]] = []
        self.called, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.run: Run | None = None

    def __call__(self, path: Path, iteration: int, *, url: str) -> dict[str, float]:
        prefix = url.rpartition('/')[2]
        is_newest = self.run.newest == prefix and self.run.store.info(f'{prefix}/{MANIFEST_NAME}') is not None
        self.calls.append((iteration, url, is_newest, (path / MANIFEST_NAME).is_file()))
        self.called.release()
        assert self.may_end.acquire(timeout=SECS)
        return {'is_kept': (path / MANIFEST_NAME).is_file() and prefix in self.run.prefixes()}


class ActionRun(Run):
    """A run whose action waits."""

    def __init__(self, parent: Path, *, keeps_all: bool) -> None:
        self.function = Function()
        log = RunLog(logging.getLogger('on_saved'), 'test')
        self.after = AfterSaves(self.function, log, timeout_secs=SECS, keeps_all=keeps_all)
        super().__init__(parent, logging.getLogger('uploads'), max_keep=1, listener=self.after)
        self.function.run = self
        self.after.start()

    def url(self, number: int) -> str:
        return f'{self.store.url}/hf_model_iter_{number}'

    def end(self) -> None:
        """As the manager does."""
        self.uploads.cancel()
        self.after.close()
        self.uploads.end()


@pytest.fixture
def make(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    made: list[ActionRun] = []

    def one(*, keeps_all: bool = False) -> ActionRun:
        made.append(ActionRun(tmp_path, keeps_all=keeps_all))
        return made[-1]

    yield one
    for run in made:
        run.function.may_end.release(99)
        run.end()
        run.folder.release()


def test_it_runs_once_the_save_is_visible(make, tmp_path, monkeypatch):
    run = make()
    away = Away(run.store, monkeypatch)
    away.waits = True
    run.save(1)
    assert away.attempts.acquire(timeout=SECS)
    assert not run.function.called.acquire(timeout=0.2) and len(kept(tmp_path)) == 1
    away.is_there.set()
    assert run.function.called.acquire(timeout=SECS)
    assert run.function.calls == [(1, run.url(1), True, True)]
    assert run.uploads.is_done_within(SECS) and len(kept(tmp_path)) == 1, 'kept for the action'
    run.function.may_end.release()
    assert run.after.wait(SECS) and kept(tmp_path) == []
    assert [result.numbers for result in run.after.results()] == [{'is_kept': 1.0}]


def test_a_newer_upload_neither_waits_nor_deletes_what_is_in_use(make, tmp_path):
    run = make(keeps_all=True)
    run.save(1)
    assert run.function.called.acquire(timeout=SECS)
    for number in (2, 3):
        run.save(number)
        assert run.uploads.is_done_within(SECS) and run.newest == f'hf_model_iter_{number}'
    assert run.prefixes() == ['hf_model_iter_1', 'hf_model_iter_2', 'hf_model_iter_3'] and len(kept(tmp_path)) == 3
    run.function.may_end.release(3)
    assert run.after.wait(SECS) and kept(tmp_path) == []
    assert [result.numbers for result in run.after.results()] == [{'is_kept': 1.0}] * 3
    run.save(4)
    assert run.uploads.is_done_within(SECS)
    assert run.prefixes() == ['hf_model_iter_4'], 'released saves go with the next upload'


def test_what_was_in_use_is_deleted_at_the_end(make):
    run = make()
    run.save(1)
    assert run.function.called.acquire(timeout=SECS)
    run.save(2)
    assert run.uploads.is_done_within(SECS) and run.prefixes() == ['hf_model_iter_1', 'hf_model_iter_2']
    run.function.may_end.release(2)
    assert run.after.wait(SECS)
    run.end()
    assert run.prefixes() == ['hf_model_iter_2'] and 'hf_model.lock' not in run.store.list()


def test_a_waiting_action_gives_way_to_a_newer_upload(make, tmp_path, caplog):
    run = make()
    for number in (1, 2, 3):
        run.save(number)
        assert run.uploads.is_done_within(SECS)
        if number == 1:
            assert run.function.called.acquire(timeout=SECS)
    assert len(kept(tmp_path)) == 2
    assert 'on_saved for hf_model, iter_2 was skipped: there is a newer save' in caplog.text
    run.function.may_end.release(2)
    assert run.after.wait(SECS) and [call[0] for call in run.function.calls] == [1, 3]
    run.end()
    assert run.prefixes() == ['hf_model_iter_3']


def skipped(caplog: Any) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line.partition('on_saved for ')[2] for line in lines if 'on_saved for' in line and 'skipped' in line]


def test_saves_that_are_not_uploaded_are_skipped(make, tmp_path, monkeypatch, caplog):
    run = make()
    away = Away(run.store, monkeypatch)
    for number in (1, 2):
        run.save(number)
        assert away.attempts.acquire(timeout=SECS)
    assert run.function.calls == []
    away.is_there.set()
    assert run.function.called.acquire(timeout=SECS)
    assert skipped(caplog) == ['hf_model, iter_1 was skipped: the save was not uploaded']
    assert [call[0] for call in run.function.calls] == [2] and len(kept(tmp_path)) == 1


def test_at_the_end_too(make, tmp_path, monkeypatch, caplog):
    run = make()
    Away(run.store, monkeypatch)
    run.save(1)
    assert not run.uploads.is_done_within(0.2)
    run.end()
    assert skipped(caplog) == ['hf_model, iter_1 was skipped: the save was not uploaded']
    assert run.function.calls == [] and kept(tmp_path) == []


@pytest.mark.parametrize('fault', ['not published', 'not kept', 'no name'])
def test_an_upload_that_fails(make, tmp_path, monkeypatch, caplog, fault):
    run = make()

    def fail(*args: Any) -> None:
        raise TargetError('No space left on device')

    with monkeypatch.context() as patch:
        if fault == 'not kept':
            patch.setattr(KeptFolder, 'keep', fail)
        else:
            patch.setattr(run.destination, 'publish' if fault == 'not published' else 'new_place', fail)
        run.save(1)
        assert run.uploads.is_done_within(SECS)
    assert skipped(caplog) == ['hf_model, iter_1 was skipped: the save was not uploaded']
    assert run.function.calls == [] and kept(tmp_path) == []


def test_an_upload_that_ends_after_the_run(make, tmp_path, monkeypatch, caplog):
    run = make()
    away = Away(run.store, monkeypatch)
    away.waits = True
    run.save(1)
    run.after.close()
    away.is_there.set()
    assert run.uploads.is_done_within(SECS) and run.newest == 'hf_model_iter_1'
    assert skipped(caplog) == ['hf_model, iter_1 was skipped: training has ended']
    assert run.function.calls == [] and kept(tmp_path) == []


def test_what_cannot_be_deleted_at_the_end_is_left_to_the_next_run(make, monkeypatch):
    run = make()
    run.save(1)
    assert run.function.called.acquire(timeout=SECS)
    run.save(2)
    assert run.uploads.is_done_within(SECS)
    run.function.may_end.release(2)
    assert run.after.wait(SECS)
    with monkeypatch.context() as patch:
        patch.setattr(Store, 'unfinished_uploads', lambda *args: (_ for _ in ()).throw(StoreError('AccessDenied')))
        run.end()
    assert 'hf_model.lock' not in run.store.list() and run.prefixes() == ['hf_model_iter_1', 'hf_model_iter_2']
    run.uploads.claim(0)
    assert run.prefixes() == ['hf_model_iter_2']
