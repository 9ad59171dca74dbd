"""Errors of a full disk say which one is full."""

import errno
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from xhf_hooks.system.files import errors_naming

#: Linux's device that is always full.
FULL = Path('/dev/full')


def write_in_python() -> None:
    FULL.write_bytes(b'x')


def write_in_rust() -> None:
    Tokenizer(models.WordLevel({'word': 0}, unk_token='word')).save(str(FULL))


def write_in_c() -> None:
    fd = os.open(FULL, os.O_WRONLY)
    try:
        os.pwrite(fd, b'x', 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize('write', [write_in_python, write_in_rust, write_in_c])
def test_a_full_disk_is_named_whatever_writes(write, tmp_path):
    with pytest.raises(OSError, match='No space left on device') as caught, errors_naming(tmp_path / 'model'):
        write()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / 'model'))


@pytest.mark.parametrize(
    'error', [FileNotFoundError(errno.ENOENT, 'no such file', '/known'), OSError('of a library'), ValueError('(of)')]
)
def test_other_errors_stay_as_they_are(error, tmp_path):
    with pytest.raises(type(error)) as caught, errors_naming(tmp_path):
        raise error
    assert caught.value is error
