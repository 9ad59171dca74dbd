"""Before training, a file is written next to the folder as the chosen writer will write."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs.small_saves import failing
from xhf_hooks.errors import XhfError
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs import access
from xhf_hooks.runs.access import choose_strategy

#: What a mount of an object store refuses.
CALLS: dict[str, Callable[..., Any]] = {'ftruncate': os.ftruncate, 'pwrite': os.pwrite, 'fsync': os.fsync}


@pytest.mark.parametrize('call', CALLS)
@pytest.mark.parametrize('writer', ['auto', 'positional', 'parallel', 'stream', 'gather'])
def test_a_folder_that_takes_files_only_from_front_to_back_is_refused(tmp_path, monkeypatch, writer, call):
    """By every writer with the same sentence. What rclone removes may come back once."""
    unlink, removed = Path.unlink, list[Path]()

    def unlink_and_come_back(path: Path, *args: Any, **options: Any) -> None:
        unlink(path, *args, **options)
        if path not in removed:
            removed.append(path)
            path.touch()

    monkeypatch.setattr(access, '_PAUSES_SECS', (0.0, 0.0))
    monkeypatch.setattr(Path, 'unlink', unlink_and_come_back)
    monkeypatch.setattr(os, call, failing(errno.EPERM, instead_of=CALLS[call]))
    with pytest.raises(
        XhfError, match=rf'{tmp_path} cannot be written: .*Operation not permitted.*; set out_dir to a folder'
    ):
        choose_strategy(logging.getLogger('test'), writer, tmp_path / 'hf_model', Collective.connect())
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize('writer', ['positional', 'stream'])
def test_what_is_tried_is_removed(tmp_path, writer):
    found = choose_strategy(logging.getLogger('test'), writer, tmp_path / 'hf_model', Collective.connect())
    assert found.value == writer and [*tmp_path.iterdir()] == []
