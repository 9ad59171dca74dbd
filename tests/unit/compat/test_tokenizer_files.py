"""Where a tokenizer is written to be looked at, and what a full disk does to that."""

import errno
import tempfile
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.models.model_folder import save_tokenizer
from xhf_hooks.compat.tokenizer_files import write_tokenizer


@pytest.fixture
def base(tmp_path) -> Path:
    save_tokenizer(tmp_path / 'base', 100)
    return tmp_path / 'base'


@pytest.fixture
def out(tmp_path) -> Path:
    (tmp_path / 'out').mkdir()
    return tmp_path / 'out'


def test_nothing_is_written_but_where_the_save_goes(base, out, monkeypatch):
    """Neither to /dev/shm, which has 64 MB in a container, nor to TMPDIR."""
    made, make = [], tempfile.mkdtemp
    monkeypatch.setattr(tempfile, 'tempdir', '/nonexistent')

    def note(*args, **more) -> str:
        made.append(make(*args, **more))
        return made[-1]

    monkeypatch.setattr(tempfile, 'mkdtemp', note)
    assert write_tokenizer(out, AutoTokenizer.from_pretrained(base), '') == []
    assert {Path(folder).parent for folder in made} == {out}
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in base.iterdir()
    }


@pytest.mark.parametrize('n_written', [0, 1, 2])
def test_a_full_disk_is_an_error_and_never_another_tokenizer(base, out, monkeypatch, n_written):
    """Whichever of the tokenizers that are written to be compared has no room. tokenizers' errors are Rust's."""
    tokenizer, write, left = AutoTokenizer.from_pretrained(base), PreTrainedTokenizerBase.save_pretrained, [n_written]

    def fill(self, *args, **more):
        if not left[0]:
            raise Exception('No space left on device (os error 28)')
        left[0] -= 1
        return write(self, *args, **more)

    monkeypatch.setattr(PreTrainedTokenizerBase, 'save_pretrained', fill)
    with pytest.raises(OSError, match=f'No space left on device.*{out}') as caught:
        write_tokenizer(out, tokenizer, '')
    assert caught.value.errno == errno.ENOSPC and list(out.iterdir()) == []
