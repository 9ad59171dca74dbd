"""Uploads by several ranks, here threads of one process: who sends what, and what is an error."""

import logging
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.helpers.ranks.launch import HANG_SECS, until
from tests.helpers.runs.tiny_checkpoint import commit_one, iteration
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.retention import Retention
from xhf_hooks.places.store import StoredSaves, read_pointer, send_file
from xhf_hooks.runs.ends import upload
from xhf_hooks.runs.ends.each_save import SaveJob
from xhf_hooks.runs.ends.upload import UploadBoard, Uploads
from xhf_hooks.runs.telemetry import RunLog

NAMES = ('hf_model', 'hf_model_best')


class Ranks:
    """Rank 0 and rank 1. Rank 0 sends nothing before :attr:`may_send`.

    Attributes:
        senders: Prefix of a save to the ranks that have sent a file of it.
    """

    def __init__(self, folder, monkeypatch) -> None:
        self.may_send, self.senders = threading.Event(), defaultdict(set)
        self._number, self.store = 0, None
        self._folders = {name: CheckpointFolder(folder / name, 1) for name in NAMES}
        self.ranks, board = [], UploadBoard(dist.HashStore())
        for rank in (0, 1):
            saves = {name: StoredSaves((folder / 'store').as_uri(), name, Retention(-1)) for name in NAMES}
            log = RunLog(logging.getLogger(f'rank{rank}'), 'test')
            self.ranks.append(Uploads(saves, log, board, rank, 2).start())
            self.ranks[-1]._thread.name = str(rank)
            self.ranks[-1].require_usable()
        self.destinations = self.ranks[0]._destinations
        monkeypatch.setattr(upload, 'send_file', self._send)
        monkeypatch.setattr(upload, '_MOST_POLL_SECS', 0.1)

    def _send(self, store, prefix, *more) -> None:
        rank = int(threading.current_thread().name)
        if rank == 0:
            self.may_send.wait(HANG_SECS)
        send_file(store, prefix, *more)
        self.senders[prefix].add(rank)

    def save(self, name: str = 'hf_model') -> None:
        """The next save, which each rank is told of."""
        self._number += 1
        number, folder = self._number, self._folders[name]
        commit_one(folder, number)
        kept = folder.pin()
        for rank, uploads in enumerate(self.ranks):
            release = kept.unpin if rank == 0 else lambda: None
            job = SaveJob(name, iteration(number), kept.path, release, number)
            uploads.add(job, replaces=rank == 0)

    def newest(self, name: str = 'hf_model') -> str | None:
        return read_pointer(self.destinations[name].store, name).newest


@pytest.fixture
def ranks(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    made = Ranks(tmp_path, monkeypatch)
    yield made
    made.may_send.set()
    for uploads in made.ranks:
        uploads.close()


def said_by(caplog, rank: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == f'rank{rank}']


def test_other_ranks_help_with_a_save_that_rank_0_begins_late(ranks, caplog):
    """However long it was busy with the one before."""
    ranks.ranks[1].patience_secs = 0.1
    ranks.save()
    until(lambda: ranks.senders['hf_model_iter_1'] == {1})
    ranks.save()
    time.sleep(0.5)
    ranks.may_send.set()
    assert ranks.ranks[0].wait(HANG_SECS)
    assert ranks.newest() == 'hf_model_iter_2'
    assert ranks.senders == {'hf_model_iter_1': {0, 1}, 'hf_model_iter_2': {0, 1}}
    assert said_by(caplog, 1) == []


def test_saves_that_rank_0_skips_are_no_error_elsewhere(ranks, caplog):
    """Other ranks go on to the one that rank 0 begins instead, even if that has another name."""
    ranks.save()
    until(lambda: ranks.senders['hf_model_iter_1'] == {1})
    for name in ('hf_model_best', 'hf_model', 'hf_model', 'hf_model_best'):
        ranks.save(name)
    ranks.may_send.set()
    assert ranks.ranks[0].wait(HANG_SECS)
    assert ranks.senders.keys() == {'hf_model_iter_1', 'hf_model_iter_4', 'hf_model_best_iter_5'}
    assert all(senders == {0, 1} for senders in ranks.senders.values())
    skipped = [line for line in said_by(caplog, 0) if 'there is a newer save' in line]
    assert len(skipped) == 2 and said_by(caplog, 1) == []


def test_what_rank_0_never_begins_is_not_waited_for_elsewhere(ranks, caplog):
    """Nor told there: rank 0 says why."""

    def fail(*more) -> None:
        raise OSError('of a test')

    ranks.destinations['hf_model'].begin = fail
    ranks.ranks[1].patience_secs = float('inf')
    ranks.save()
    assert ranks.ranks[0].wait(HANG_SECS) and ranks.ranks[1].wait(HANG_SECS)
    ranks.ranks[1].close()
    assert 'of a test' in said_by(caplog, 0)[0] and said_by(caplog, 1) == []


def test_ranks_share_the_bytes_of_a_save():
    """Also where few files, such as those of an embedding and a head, are larger than the others."""
    sizes = [123, 123, *[52] * 9, 8]
    manifest = SimpleNamespace(files={f'{i:02}': SimpleNamespace(nbytes=nbytes) for i, nbytes in enumerate(sizes)})
    shares = [Uploads({}, logging.getLogger(), rank=rank, n_ranks=4)._share(manifest) for rank in range(4)]
    assert sorted(name for share in shares for name in share) == sorted(manifest.files)
    assert [sum(manifest.files[name].nbytes for name in share) for share in shares] == [175, 175, 208, 164]
